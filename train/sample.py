"""Text from a model, a token at a time."""

import contextlib
from collections.abc import Callable

import torch

from train.model import Transformer
from train.tokenizer import Vocabulary


@torch.no_grad()
def continue_text(model: Transformer, vocabulary: Vocabulary, prompt: str, n_tokens: int, seed: int,
                  temperature: float = 0.8, top_k: int = 50, agree: Callable[[int], int] | None = None) -> str:
    """The prompt and up to n_tokens more, ended early by the end-of-text token.

    agree: where all processes of a split model sample together, what makes one choice of theirs.
    Samples from the top_k most likely entries at the temperature (0: always the likeliest). Rows of the
    embedding that the tokenizer has no entry for are never chosen.
    """
    device = model.rotary.device
    generator = torch.Generator().manual_seed(seed)
    ids = [vocabulary.end_of_text, *vocabulary.encode(prompt)]
    # each length would be compiled anew; setting the stance imports the compiler
    as_written = torch.compiler.set_stance("force_eager") if model.compiled else contextlib.nullcontext()
    for _ in range(n_tokens):
        window = torch.tensor([ids[-model.rotary.shape[1]:]], device=device)
        with as_written:  # a split model has its weights only within its own forward pass
            logits = model(window)[:, -1] if agree else model.lm_head(model.hidden(window)[:, -1])
        logits = logits[0, :vocabulary.size].float().cpu()
        if temperature == 0:
            choice = int(logits.argmax())
        else:
            best, entries = logits.topk(min(top_k, vocabulary.size))
            choice = int(entries[torch.multinomial((best / temperature).softmax(0), 1, generator=generator)])
        choice = agree(choice) if agree else choice
        if choice == vocabulary.end_of_text:
            break
        ids.append(choice)
    return vocabulary.decode(ids[1:])
