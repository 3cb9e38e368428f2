"""What SGLang calls when it loads its plugins, in every process of a server."""

from __future__ import annotations

from functools import partial

from sglang_ext import compat
from sglang_ext.errors import refusal_ends_process
from sglang_ext.settings import bench_plan
from sglang_ext.sglang_version import check_version


def register() -> None:
    """Entry point of the group ``sglang.srt.plugins``: add the algorithms, or end the process with the reason."""
    with refusal_ends_process():
        check_version()
    from sglang.srt.platforms import current_platform

    from sglang_ext import algorithms, cpu
    from sglang_ext.metrics import scheduler

    if type(current_platform).__module__ == "sglang_ext.cpu.platform":
        cpu.install()
    algorithms.register()
    compat.on_scheduler_start(scheduler.attach)
    if plan := bench_plan():
        from sglang_ext.bench import probe

        compat.on_scheduler_start(partial(probe.attach, plan=plan))
