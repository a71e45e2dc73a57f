"""The learning rate, computed from the step; nothing about it is stored, so resuming cannot bend it."""

import math

from settings.config import Config


def lr_at(step: int, config: Config) -> float:
    """Rate of the step-th update, the first being 1.

    Linear over WARMUP_TOKENS, then by LR_SCHEDULE down to MIN_LEARNING_RATE at TRAIN_TOKENS, then constant:

        cosine   half a cosine (Loshchilov and Hutter 2017, without restarts)
        wsd      constant, and over the last DECAY_TOKENS a straight line (Hu et al. 2024): the constant part
                 can be prolonged, and decayed from any of its checkpoints

    Tokens are those of the steps up to and including this one, so the first step of a warm-up has a rate
    above zero.
    """
    peak, low = config.learning_rate, config.min_learning_rate or 0.0
    tokens = step * config.batch_tokens
    if tokens < config.warmup_tokens:
        return peak * tokens / config.warmup_tokens
    if config.lr_schedule == "wsd":
        left = (config.train_tokens - tokens) / (config.decay_tokens or config.train_tokens)
        return peak if left >= 1 else low + (peak - low) * max(0.0, left)
    progress = min(
        1.0, (tokens - config.warmup_tokens) / (config.train_tokens - config.warmup_tokens)
    )
    return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
