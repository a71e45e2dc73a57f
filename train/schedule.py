"""The learning rate, computed from the step; nothing about it is stored, so resuming cannot bend it."""

import math

from train.config import Config


def lr_at(step: int, config: Config) -> float:
    """Rate of the step-th update, the first being 1.

    Linear over WARMUP_TOKENS, cosine from LEARNING_RATE to MIN_LEARNING_RATE at TRAIN_TOKENS
    (Loshchilov and Hutter 2017, without restarts), then constant. Tokens are those of the steps
    up to and including this one, so the first step of a warm-up has a rate above zero.
    """
    peak, low = config.learning_rate, config.min_learning_rate or 0.0
    tokens = step * config.batch_tokens
    if tokens < config.warmup_tokens:
        return peak * tokens / config.warmup_tokens
    progress = min(1.0, (tokens - config.warmup_tokens) / (config.train_tokens - config.warmup_tokens))
    return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * progress))
