"""Words of documents as they are compared, and hashes of runs of words.

A word is lower case, delimited by white space and without punctuation: everything that is neither
a letter, a digit nor white space is taken out ("Don't" is "dont"), as in Brown et al. 2020 (GPT-3,
appendix C). Hashes have 64 bits. One of 10**7 runs is found among 10**11 others by chance alone
with a probability of 5%.
"""

import re

import numpy as np
import xxhash

NOT_IN_A_WORD = re.compile(r"[^\w\s\0]+|_+")
MARKER = " \0 "  # between two documents, so that no run spans them: a word that no text has
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def split_words(text: str) -> list[str]:
    """Return the words of a text."""
    return NOT_IN_A_WORD.sub("", text.lower()).split()


def hash_words(words: list[str]) -> np.ndarray:
    """Hash each word: (words,) uint64."""
    hashes = map(xxhash.xxh3_64_intdigest, " ".join(words).encode().split())
    return np.fromiter(hashes, np.uint64, len(words))


def hash_documents(texts: list[str]) -> np.ndarray:
    """Hash the words of documents, and a marker between two: (words,) uint64."""
    text = MARKER.join(text.replace("\0", "") for text in texts)
    return hash_words(split_words(text))


def hash_runs(words: np.ndarray, length: int) -> np.ndarray:
    """Hash all runs of `length` words: (len(words) - length + 1,) uint64, or (0,).

    Args:
        words: (words,) uint64, their hashes.
    """
    runs = words
    for k in range(1, length):
        runs = runs[:-1] * MULTIPLIER + words[k:]
    return runs
