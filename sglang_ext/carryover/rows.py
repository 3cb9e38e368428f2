"""The carry rule: which rows of a verify step the next draft reads, and where they lie.

Pure tensor arithmetic, used by serving and by training alike; it imports neither SGLang nor a trainer.

Notation, per request: ``L`` committed tokens before the decode round, ``W`` verify width (rows of one
verify step), ``c`` rows the round committed (1 <= c <= W), ``r = W - c`` rejected rows, ``Q`` query width
(rows of one draft block). Row j of a verify step is the token at position L + j.

The rejected rows already have slots: the columns L + c .. L + W - 1 of the request's slot row lie right
behind the committed prefix. Written with the learned embedding added, they are read by the next draft as
an ordinary prefix of length L + W (= committed + carried), whose block starts at column L + W while its
positions stay at L + c. So the whole state is one integer per request slot: L of its last decode round.
"""

from __future__ import annotations

from typing import Any

import torch

NO_ROUND = -1
"""State of a slot whose last forward was no decode round: nothing to carry."""


def carried_rows(previous: Any, committed: Any, verify_width: int, room: Any, limit: int | None = None) -> Any:
    """Number of rejected rows that the coming draft reads.

    Operators alone, so that one rule serves tensors on a device and numbers on the host, where they are quicker than
    small tensors.

    Args:
        previous: [bs] committed length before each slot's last decode round, or ``NO_ROUND``.
        committed: [bs] committed length now.
        verify_width: W.
        room: [bs] columns left in the slot row behind the committed prefix and one draft block.
        limit: read at most this many rows, the ones next to the prefix (0 switches the carry off).

    Returns:
        [bs] rows; 0 where there is no round to carry from.
    """
    rejected = previous + verify_width - committed
    rows = rejected * ((previous >= 0) & (rejected >= 0) & (rejected < verify_width))
    room = room * (room > 0)
    rows = rows - (rows - room) * (rows > room)
    return rows if limit is None else rows - (rows - limit) * (rows > limit)


def draft_slots(
    slot_rows: torch.Tensor,
    slots: torch.Tensor,
    committed: torch.Tensor,
    carried: torch.Tensor,
    stock: torch.Tensor,
) -> torch.Tensor:
    """KV slots of the draft block, moved behind the carried rows.

    Args:
        slot_rows: [request slots, columns] KV slot of each column (SGLang's ``req_to_token``).
        slots: [bs] request slots.
        committed, carried: [bs] lengths in rows.
        stock: [bs, Q] the unshifted block's KV slots. Kept where nothing is carried: the round of a request
            that has already ended may reach past its row's end, where a gather must not go.

    Returns:
        [bs * Q] int64 KV slots.
    """
    width = stock.shape[1]
    columns = (committed + carried)[:, None] + torch.arange(width, device=committed.device)
    columns = columns.clamp(max=slot_rows.shape[1] - 1)
    shifted = slot_rows[slots[:, None], columns].to(torch.int64)
    return torch.where(carried[:, None] > 0, shifted, stock.to(torch.int64)).reshape(-1)


def rejected_mask(commit_lens: torch.Tensor, verify_width: int) -> torch.Tensor:
    """[bs, W] bool: row j of each request is rejected (j >= commit length; [bs] int)."""
    rows = torch.arange(verify_width, device=commit_lens.device)
    return rows[None, :] >= commit_lens[:, None].to(rows.dtype)


def write_all_rows(
    hidden: torch.Tensor, commit_lens: torch.Tensor, verify_width: int, embedding: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn "write the committed rows" into "write all rows, the rejected ones marked".

    The learned embedding is added before the drafter's feature projection (paper section 2.1).

    Args:
        hidden: [>= bs * W, D] target features of the verified rows; trailing rows are padding. Not modified,
            since SGLang may share the buffer.
        commit_lens: [bs] committed rows per request. Zero gates the write of padding rows, and stays a gate.
        embedding: [D] ``carryover_embedding``.

    Returns:
        The features [bs * W, D] to project and the number of rows [bs] to write.
    """
    hidden = hidden[: commit_lens.shape[0] * verify_width]
    rejected = rejected_mask(commit_lens, verify_width).reshape(-1, 1)
    marked = torch.where(rejected, hidden + embedding.to(hidden.dtype), hidden)
    return marked, torch.where(commit_lens > 0, torch.full_like(commit_lens, verify_width), commit_lens)


class CarryState:
    """One integer per request slot: the committed length before the slot's last decode round.

    Kept on the device for the draft and mirrored on the host for attention backends that plan there, as int32:
    a length is far below 2^31. Every update must be issued on the stream that runs the forwards, in their order.
    Row 0 belongs to padding and never holds a round.
    """

    def __init__(self, slots: int, device: torch.device | str) -> None:
        self.previous = torch.full((slots,), NO_ROUND, dtype=torch.int32, device=device)
        self.previous_cpu = torch.full((slots,), NO_ROUND, dtype=torch.int32)
        self.tenant = torch.full((slots,), NO_ROUND, dtype=torch.int64)
        self._host, self._tenant = self.previous_cpu.numpy().data, self.tenant.numpy()  # the same memory

    def bytes_per_slot(self) -> tuple[int, int]:
        """What a request slot takes on the device and on the host."""
        return self.previous.element_size(), self.previous_cpu.element_size() + self.tenant.element_size()

    def forget(self, slots: torch.Tensor, slots_cpu: torch.Tensor) -> None:
        """Drop what these slots carry ([n] int64 on the device, and the same on the host)."""
        self.previous.index_fill_(0, slots.to(torch.int64), NO_ROUND)
        self.previous_cpu.index_fill_(0, slots_cpu.to(torch.int64), NO_ROUND)

    def admit(self, slots_cpu: torch.Tensor, generation: torch.Tensor) -> torch.Tensor | None:
        """Drop what a former tenant of the slots [n] left. ``generation`` [request slots] (host) counts its tenants.

        Returns the slots (on the device) that have a new tenant; None where there is none. A round does this on the
        host, where numpy takes a tenth of what small tensors take.
        """
        slots = slots_cpu.numpy()
        present = generation.numpy()[slots]
        new = slots[self._tenant[slots] != present]
        if not new.size:
            return None
        self._tenant[slots] = present
        found = torch.from_numpy(new).to(torch.int64)
        on_device = found.to(self.previous.device, non_blocking=True)
        self.forget(on_device, found)
        return on_device

    def advance(self, slots: torch.Tensor, committed: torch.Tensor) -> torch.Tensor:
        """Start a decode round: return each slot's previous length [bs] and store the present one."""
        slots = slots.to(torch.int64)
        previous = self.previous[slots]
        self.previous.index_copy_(0, slots, committed.to(self.previous.dtype))
        return previous

    def carried_cpu(
        self,
        slots_cpu: torch.Tensor,
        committed_cpu: torch.Tensor,
        query_width: int,
        verify_width: int,
        columns: int,
        limit: int | None,
    ) -> torch.Tensor:
        """:func:`shift` on the host mirror: rows carried [bs]; the lengths must be exact, not bounds."""
        found = []
        for slot, committed in zip(slots_cpu.tolist(), committed_cpu.tolist(), strict=True):
            room = columns - committed - query_width
            found.append(carried_rows(self._host[slot], committed, verify_width, room, limit))
            self._host[slot] = committed
        return torch.tensor(found)


def shift(
    state: CarryState,
    slot_rows: torch.Tensor,
    slots: torch.Tensor,
    committed: torch.Tensor,
    stock: torch.Tensor,
    verify_width: int,
    columns: int,
    limit: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Begin a round on the device: the draft block's KV slots [bs * Q] and prefix lengths [bs] behind carried rows.

    ``columns`` is how many of a slot row may be used; the other arguments are those of ``carried_rows`` and
    ``draft_slots``. Advances ``state``.
    """
    previous = state.advance(slots, committed)
    carried = carried_rows(previous, committed, verify_width, columns - committed - stock.shape[1], limit)
    return draft_slots(slot_rows, slots, committed, carried, stock), committed + carried
