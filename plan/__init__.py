"""Before a run: what it will take in time, memory, disk, network and money, and whether it can be. No torch.

load.py          the settings, with links that were measured
fleet.py         CARDS, or this machine, to devices
run.py           what is planned: settings, devices and model; runs with other settings
memory.py        memory of a pretraining process by part; activations.py: what a block keeps
finetuning/      shapes of transformers' models, what is trained of them, and their memory
speed.py         MFU and where it is from; measured.py: what make doctor PROBE=1 measured; this_machine.py
past_runs.py     how fast finished runs were; prediction.py: plan.json of a run; review.py: what became of it
fragments.py     what SYNC_FRAGMENTS divides
network/         DDP, FSDP, HSDP and DiLoCo over the fleet's links; what was published of DiLoCo's loss
time.py          hours and milestones; run_so_far.py: steps that are made already
gpu_groups.py    GPUs of several kinds: what each does, and whether to take all of them
storage.py       checkpoints, shards and downloads; data_wanted.py: how often text is repeated
scaling.py       expected loss
checks.py        what cannot be, and settings with which it could
planner.py       the plan: its fields are the keys of its JSON
report.py        the plan as text
sweep.py         runs compared in a table
"""
