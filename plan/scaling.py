"""Expected loss of a model of so many parameters after so many tokens, by a law that others fitted to their runs.

    L(N, D) = E + A / N^alpha + B / D^beta      nats a token; N parameters, D tokens of training

The form is Hoffmann et al. 2022 (arXiv 2203.15556, 3.3, "approach 3"), the constants those of Besiroglu et al. 2024
(arXiv 2404.10102), who fitted the same runs anew: the first fit had stopped before its minimum, and asks for some 60
tokens a parameter at the compute of Chinchilla, where the paper's other two approaches, and this fit, ask for about 20.
N counts all parameters, embeddings too (which Kaplan et al. 2020 left out), and compute is 6 N D.

Those runs read MassiveText with a tokenizer of 32,000: a loss on other data, or by another vocabulary, is another
number. So only differences between rows mean something here, for models of 70M to 16B parameters (what was fitted),
and no value is what a run will print. Standard errors of the constants are 6% of alpha and beta, 26% of A, 62% of B.
"""

import dataclasses
import math

from hardware.model_size import parameters
from plan.data_wanted import TOKENS_PER_PARAMETER, declared_tokens
from settings.config import Config
from train.data.data_paths import source_of, wanted_tokens

SMALLEST, LARGEST = 70e6, 16e9  # parameters of the models that the law was fitted to


@dataclasses.dataclass(frozen=True)
class Law:
    """The five constants of the form above."""

    floor: float
    a: float
    b: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        return self.floor + self.a / parameters**self.alpha + self.b / tokens**self.beta


LAW = Law(floor=1.8172, a=482.01, b=2085.43, alpha=0.3478, beta=0.3658)

# Muennighoff et al. 2023 (arXiv 2305.16264, 3.1 and appendix A): a pass of the same text is worth less each time, and
# exponentially so, with this many passes beyond the first for a fall to 1/e; fitted on 182 runs, to 9B parameters.
REPEATS = 15.387756


def expected_loss(parameters: float, tokens: float) -> float:
    """Nats a token, by the law; of tokens that are repeated pass effective_tokens."""
    return LAW.loss(parameters, tokens)


def rule_tokens(parameters: float) -> float:
    """By the rule of thumb, 20 a parameter."""
    return TOKENS_PER_PARAMETER * parameters


def effective_tokens(unique: float, total: float) -> float:
    """What `total` tokens of text that is repeated are worth in tokens of text that is not.

    D' = U + U R* (1 - exp(-R / R*)), with U tokens that differ and R = total / U - 1 passes after the first. The paper
    found this for data repeated whole; models with dropout and weight decay, both of 0.1.
    """
    if total <= unique:
        return total
    return unique * (1 + REPEATS * (1 - math.exp(-(total / unique - 1) / REPEATS)))


def worth(c: Config) -> float:
    """What the tokens of a run are worth, of sources that say how many they have, and of others as if all were new.
    Raises CorpusError."""
    total = 0.0
    for name in c.mixture:
        source = source_of(c, name)
        there = declared_tokens(c, source)
        limits = [] if there is None else [there]
        total += effective_tokens(min(limits, default=math.inf), wanted_tokens(c, name))
    return total


def loss_of(c: Config) -> float | None:
    """Expected at the end of a run, nats a token, repeated text counted for less. None of a model that the law is not
    for, and of so few tokens that it has more than the ln V of a model that guesses. Raises CorpusError."""
    size = parameters(c).total
    if not SMALLEST <= size <= LARGEST:
        return None
    loss = expected_loss(size, worth(c))
    return loss if loss <= math.log(c.vocab_size) else None
