"""Exact and near duplicates: a hash of the normalised text, then MinHash over word 5-grams."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator
from multiprocessing import Pool

import numpy as np

from sglang_ext.training.text.documents import Document

PERMUTATIONS = 64
THRESHOLD = 0.8
"""Two texts whose sets of word 5-grams have at least about this Jaccard similarity count as one."""
_GRAM = 5
_WORD = re.compile(r"\w+")


def fingerprint(text: str) -> bytes:
    """Equal for texts that differ in white space and case alone."""
    return hashlib.blake2b(" ".join(text.split()).lower().encode(), digest_size=12).digest()


def signature(text: str) -> np.ndarray:
    """MinHash of the text's word 5-grams, uint32 [PERMUTATIONS]."""
    from datasketch import MinHash

    words = np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())] or [0], dtype=np.uint64)
    width = min(_GRAM, len(words))
    grams = np.zeros(len(words) - width + 1, dtype=np.uint64)
    for k in range(width):
        grams = grams * np.uint64(0x9E3779B97F4A7C15) + words[k : len(words) - width + 1 + k]
    grams ^= grams >> np.uint64(31)  # the low half of a product depends on the low halves alone
    hashes = np.unique(grams & np.uint64(0xFFFFFFFF))
    # datasketch 2 takes ready signatures only with its scheme named, and hashes only through a function.
    minhash = MinHash(num_perm=PERMUTATIONS, seed=1, scheme="affine32", hashfunc=int)
    minhash.update_batch(hashes.tolist())
    return minhash.hashvalues


def unique(documents: Iterable[Document], processes: int = 1) -> Iterator[Document]:
    """Drop every document that equals or nearly equals an earlier one: put what must stay first.

    Generated mathematics is compared exactly only: its problems differ in their numbers alone.
    """
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS)
    seen: set[bytes] = set()
    distinct: list[Document] = []
    for document in documents:
        print_ = fingerprint(document.text)
        if print_ not in seen:
            seen.add(print_)
            distinct.append(document)
    compared = [document for document in distinct if document.category != "math"]
    with Pool(processes) as pool:
        signatures = pool.imap(signature, (document.text for document in compared), chunksize=256)
        for document in distinct:
            if document.category != "math":
                minhash = MinHash(num_perm=PERMUTATIONS, seed=1, scheme="affine32", hashvalues=next(signatures))
                if index.query(minhash):
                    continue
                index.insert(document.id, minhash)
            yield document
