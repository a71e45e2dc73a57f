"""Fine-tuning: conversations, of which only the assistant's tokens are scored.

    row_shapes.py    a row of any accepted shape -> a conversation, or the reason why it is none
    conversations.py DATA, files here or on the Hub -> conversations in order; each drop is named
    chat_template.py conversations -> token ids and which of them are scored; prompts and stop tokens
    examples.py      all of that once, as arrays on disk; which conversations are held out
    packing.py       examples of any length -> windows of SEQ_LEN, a pure function of seed and epoch
    batches.py       what one process trains on in one step
    preview.py       one example as text, with its scored parts marked
    model_folder.py  the folder in Hugging Face format of MODEL, RUN_NAME or INIT_FROM
    weights.py       safetensors -> transformers' own conversion -> each process's part of each weight
    adapter.py       LoRA by peft: which matrices, how they begin, what they are called in files
    hf_model.py      a model of transformers' with the loss inside forward, as the trainer takes it
    packed_attention.py  attention of packed examples, which transformers' models call
    head.py          what a model makes of its hidden states, and the loss in chunks of its logits
    prepare_data.py  DATA for MODEL, and a report; also a command
    loader.py        what the trainer's loop asks of DATA
    perplexity.py    perplexity of held-out conversations, with one all-reduce
    lite.py          checkpoints of adapters alone, in peft's format
    main.py          the entry point, and a fine-tuning put together from these
    final_exchange.py   the question that a run ends with
    merge.py         what was trained, merged into MODEL's files
    pipeline/        make pipeline: settings of its stages, exercises for a first try, a summary
    chat.py          make chat, and make sample of a fine-tuned run
    chat_eval.py     questions of EVAL_DATA, and how many are answered right
    benchmarks.py    tasks of lm-evaluation-harness
    evaluate.py      make eval: those questions for a fine-tuned model, bits per byte and CORE for others
    tuning_settings.py  the settings as fine-tuning takes them, and those that it chooses

It imports from train/, and nothing there imports it.
"""
