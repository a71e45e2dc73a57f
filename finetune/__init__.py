"""Fine-tuning: conversations, of which only the assistant's tokens are scored.

    row_shapes.py    a row of any accepted shape -> messages with roles, or why it is none
    reading.py       DATA, files here or on the hub -> conversations in order; what is dropped is counted and named
    template.py      messages -> token ids and which of them are scored, by the model's own chat template
    store.py         all of that once, as arrays on disk that are found again by what decides them
    several.py       several sources as one DATA
    subset.py        which conversations are held out, by a seeded hash
    packing.py       examples of any length -> windows of SEQ_LEN, a pure function of seed and epoch
    batches.py       what one process trains on in one step
    preview.py       one example as text, with masked and scored parts made visible
    model_folder.py  the folder in Hugging Face format of MODEL, RUN_NAME or INIT_FROM
    weights.py       safetensors -> transformers' own conversion -> each process's part of each weight
    adapter.py       LoRA by peft: which matrices, how they begin, what they are called in files
    hf_model.py      a model of transformers' with the loss inside forward, as the trainer takes it
    prepare_data.py  conversations put together; as a command it prepares DATA for MODEL
    loader.py        batches as the trainer's loop asks for them
    perplexity.py    perplexity of held-out conversations, with one all-reduce
    lite.py          checkpoints of adapters alone, in peft's format
    tuning_job.py    a fine-tuning put together, as train/assemble.py does a pretraining
    main.py          the entry point: train/main.py with these in the place of its own
    merge.py         what was trained, merged into MODEL's files
    exercises.py     questions and talks that are made up, for a first try
    questions.py     questions with known answers, as a chat is asked them
    chat.py          make chat, and make sample of a fine-tuned run
    evaluate.py      make eval: what is measured of which model
    chat_eval.py     questions of EVAL_DATA, and how many are answered right
    benchmarks.py    tasks of lm-evaluation-harness
    tuning_settings.py  the settings as fine-tuning takes them

It imports from train/, and nothing there imports it.
"""
