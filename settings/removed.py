"""Settings of earlier versions that no longer exist.

One that has the value that is built in now passes, wherever it is set. Another value is refused.
"""

from typing import Any

from settings.declare import format_value

# Setting -> the value that is built in now.
CONSTANTS: dict[str, Any] = {
    "ADAM_EPS": 1e-8,
    "ALERT_MINUTES": 5,
    "BENCH_ROUNDS": 5,
    "BUSY_PERCENT": 90,
    "CHAT": False,
    "CHAT_EVAL_QUESTIONS": 500,
    "CHECKPOINTS": "on",
    "CHECKPOINT_FACTOR": 3,
    "CHECKPOINT_TIMEOUT_S": 300,
    "CLOCK_PERCENT": 75,
    "COMPILE_MINUTES": 20,
    "DATA_TIMEOUT_S": 900,
    "DISK_FACTOR": 1.5,
    "EVAL_BASELINE": True,
    "EVAL_CONVERSATIONS": 200,
    "EXPORT_SHARD_GB": 5,
    "FULL_SAVE_EVERY": 0,
    "GPU_FIELDS": "all",
    "GROUP_SHARDS": 8,
    "HANG_FACTOR": 8,
    "HANG_POWER_PERCENT": 60,
    "HANG_S": 30,
    "IDLE_PERCENT": 5,
    "IMAGE_BUILDER": "auto",
    "IMBALANCE_PERCENT": 50,
    "MASTER_PORT": 29500,
    "MAX_ROLLBACKS": 3,
    "MAX_SKIPS": 3,
    "MEMORY_HOURS": 12,
    "MEMORY_PERCENT": 95,
    "MID_EPOCHS": 1,
    "MUON_MOMENTUM": 0.95,
    "NETWORK": "auto",
    "NORM_EPS": 1e-5,
    "OVERHEAD_PERCENT": 10,
    "OVERLAY": "auto",
    "PEERS_MINUTES": 3,
    "PENDING_MINUTES": 10,
    "POD_DISK_GB": 50,
    "PROFILE_STEPS": 3,
    "PULL_MINUTES": 20,
    "QUALITY_SEEDS": 3,
    "QUALITY_TOKENS": 512_000,
    "REFRESH_S": 2,
    "REPORT_TOKENS": 50_000_000,
    "SATURATED_PERCENT": 80,
    "SECRET_NAME": "pure-transformer-secrets",
    "SETUP_MINUTES": 10,
    "SFT_EPOCHS": 1,
    "SHARD_TOKENS": 100_000_000,
    "SILENT_MINUTES": 3,
    "SITE_WAIT_S": 120,
    "SKIPPED_STEPS": 2,
    "SLOW_PERCENT": 80,
    "SOURCES_DIR": "sources",
    "SPIKE_FACTOR": 1.3,
    "STARVED_PERCENT": 10,
    "SYNC_STREAMS": 16,
    "SYNC_TIMEOUT_S": 1800,
    "TORCH_BACKEND": "auto",
    "VERDICT_MINUTES": 30,
    "WAIT_MINUTES": 3,
    "WAN_LAB_SLOWER": 1,
    "WAN_LAB_SMALLER": 20,
    "WAN_LOSS_PERCENT": 0,
}
# Setting -> what to do instead.
REPLACEMENTS = {
    "ALLOW_REPEAT": 'Set max_epochs = "unlimited" in sources/NAME.toml.',
    "BASE_IMAGE": "Give it to make image, on the command line or in the environment.",
    "CHAT": "Use make chat; make eval asks EVAL_DATA.",
    "CHAT_EVAL_DATA": "Use EVAL_DATA.",
    "CHAT_EVAL_QUESTIONS": "Use EVAL_EXAMPLES.",
    "CHECKPOINTS": "SAVE_EVERY=0 trains without checkpoints.",
    "DATA_TOKENS": "TRAIN_TOKENS sets how much of a source on the Hub is prepared.",
    "EVAL_MICRO_BATCH_SIZE": "Use MICRO_BATCH_SIZE.",
    "EXPORT_DTYPE": "Use DTYPE.",
    "FLASH_ATTN_WHEEL": "Give it to make image, on the command line or in the environment.",
    "FULL_SAVE_EVERY": "Use KEEP_EVERY.",
    "IMAGE_BUILDER": "Give it to make image, on the command line or in the environment.",
    "MASTER_PORT": "Use MASTER_ADDR=HOST:PORT.",
    "MID_BATCH_TOKENS": "Use make finetune.",
    "MID_LEARNING_RATE": "Use make finetune.",
    "NODE": "Use NODE_RANK.",
    "PEER_NANOCHAT": "Put the checkout into peers/nanochat.",
    "PEER_NANOGPT": "Put the checkout into peers/nanoGPT.",
    "PEER_STOP": "Pods wait, other machines end.",
    "PEER_TORCHTITAN": "Put the checkout into peers/torchtitan.",
    "POD_CPUS": "A pod has 8 CPUs per GPU.",
    "QUALITY_PROSE": "Use DATA_MIX, with a source that reads these files.",
    "REPORT_TASKS": "Use CORE_BUNDLE.",
    "SFT_BATCH_TOKENS": "Use make finetune.",
    "SFT_LEARNING_RATE": "Use make finetune.",
    "SHM_GB": "It is a sixth of POD_MEMORY_GB.",
    "SHUTDOWN_TIMEOUT_S": "It is GRACE_PERIOD_S less 60 seconds.",
    "SITE_ADDR": "It is the address that reaches LIGHTHOUSE.",
    "STORAGE_MB_S": "make doctor PROBE=1 measures it.",
    "SYNC_ALPHA": "It is 0.5 with SYNC_DELAY, and 0 otherwise.",
    "TORCH_BACKEND": "Give it to make setup, on the command line or in the environment.",
}
# The result of a run depended on these.
SHAPED_A_RUN = {
    "ADAM_EPS",
    "EVAL_CONVERSATIONS",
    "GROUP_SHARDS",
    "MAX_ROLLBACKS",
    "MAX_SKIPS",
    "MUON_MOMENTUM",
}


def is_removed(name: str) -> bool:
    """Tell whether there was such a setting."""
    return name in CONSTANTS or name in REPLACEMENTS


def explain_removed(name: str, text: str) -> str:
    """Say why a removed setting cannot have a value; return "" if it can."""
    constant = format_value(CONSTANTS.get(name))
    if text in ("", constant) or not is_removed(name):
        return ""
    sentence = "There is no such setting any more."
    if constant:
        sentence += f" It is always {constant}."
    return f"{sentence} {REPLACEMENTS.get(name, 'Leave it out.')}"
