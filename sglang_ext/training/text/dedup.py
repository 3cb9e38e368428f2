"""Exact and near duplicates: a hash of the normalised text, then MinHash over word 5-grams."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator
from multiprocessing import get_context

import numpy as np
from datasketch import MinHash, MinHashLSH

from sglang_ext.training.text.documents import Document

PERMUTATIONS = 64
THRESHOLD = 0.8
"""Two texts whose sets of word 5-grams have at least about this Jaccard similarity count as one."""
CONTAINED = 0.3
_GRAM = 5
_RUN = 13
_WORD = re.compile(r"\w+")


def fingerprint(text: str) -> bytes:
    """Equal for texts that differ in white space and case alone."""
    return hashlib.blake2b(" ".join(text.split()).lower().encode(), digest_size=12).digest()


def grams(text: str, width: int) -> np.ndarray:
    """Hashes of all runs of ``width`` words (of the whole text if it is shorter), uint64, distinct and sorted."""
    words = np.array([zlib.crc32(word.encode()) for word in _WORD.findall(text.lower())] or [0], dtype=np.uint64)
    width = min(width, len(words))
    hashes = np.zeros(len(words) - width + 1, dtype=np.uint64)
    for k in range(width):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + words[k : len(words) - width + 1 + k]
    # The low half of a product depends on the low halves alone: mix the high half in.
    return np.unique(hashes ^ (hashes >> np.uint64(31)))


def signature(text: str) -> np.ndarray:
    """MinHash of the text's word 5-grams, uint32 [PERMUTATIONS]."""
    # datasketch 2 takes ready signatures only with its scheme named, and hashes only through a function.
    minhash = MinHash(num_perm=PERMUTATIONS, seed=1, scheme="affine32", hashfunc=int)
    minhash.update_batch((grams(text, _GRAM) & np.uint64(0xFFFFFFFF)).tolist())
    return minhash.hashvalues


def unique(documents: Iterable[Document], processes: int = 1) -> Iterator[Document]:
    """Drop every document that equals or nearly equals an earlier one: put what must stay first.

    Generated mathematics is compared exactly only: its problems differ in their numbers alone.
    """
    index = MinHashLSH(threshold=THRESHOLD, num_perm=PERMUTATIONS)
    seen: set[bytes] = set()
    distinct: list[Document] = []
    for document in documents:
        print_ = fingerprint(document.text)
        if print_ not in seen:
            seen.add(print_)
            distinct.append(document)
    compared = [document for document in distinct if document.category != "math"]
    # A fork of a process that has threads (torch's, an event loop's) can wait for a lock of theirs for ever.
    with get_context("forkserver").Pool(processes) as pool:
        signatures = pool.imap(signature, (document.text for document in compared), chunksize=256)
        for document in distinct:
            if document.category != "math":
                minhash = MinHash(num_perm=PERMUTATIONS, seed=1, scheme="affine32", hashvalues=next(signatures))
                if index.query(minhash):
                    continue
                index.insert(document.id, minhash)
            yield document


def unseen(held_out: list[Document], train: list[Document], processes: int = 1) -> list[Document]:
    """The held-out documents that training text does not largely contain.

    Signatures compare whole documents; they miss a passage that another page repeats with other text around it. A
    document goes if more than ``CONTAINED`` of its runs of 13 words are in training text. Generated mathematics stays:
    its questions differ, and its steps are common property.
    """
    runs = {document.id: grams(document.text, _RUN) for document in held_out if document.category != "math"}
    if not runs:
        return held_out
    wanted = np.unique(np.concatenate(list(runs.values())))
    known = np.zeros(len(wanted), dtype=bool)
    with get_context("forkserver").Pool(processes, _search_for, (wanted,)) as pool:
        for found in pool.imap_unordered(_found, (document.text for document in train), chunksize=256):
            known[found] = True
    shares = {name: known[np.searchsorted(wanted, run)].mean() for name, run in runs.items()}
    return [document for document in held_out if shares.get(document.id, 0.0) <= CONTAINED]


_wanted: np.ndarray


def _search_for(wanted: np.ndarray) -> None:
    """Give a worker process the sorted hashes to look for."""
    global _wanted
    _wanted = wanted


def _found(text: str) -> np.ndarray:
    """Positions in the wanted hashes of those that the text contains."""
    hashes = grams(text, _RUN)
    places = np.minimum(np.searchsorted(_wanted, hashes), len(_wanted) - 1)
    return places[_wanted[places] == hashes]
