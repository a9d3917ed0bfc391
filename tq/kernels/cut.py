"""Which tiling a call gets: the one in force, that of its GPU's table, or that of the heuristic."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from triton import next_power_of_2

from tq.kernels import tables, tuning
from tq.kernels.device import Rows
from tq.kernels.plan import Plan, Prepared
from tq.kernels.producer import Producer, constant
from tq.kernels.rows import Tiling
from tq.kernels.schemes import Scheme
from tq.kernels.target import INTERPRETED


def needs_whole_row(producer: Producer, scheme: Scheme) -> bool:
    """Whether one program must see a row entirely: something is reduced over it. Also where means are over groups, so
    that the check, whose programs see whole rows, adds them in the same order."""
    return bool(producer.moments) or scheme.granularity == "token"


def cut(prepared: Prepared, whole_row: bool) -> tuple[Tiling, tuning.RowConfig]:
    """The tiling of a call, and the configuration it is of. Asked for once in the life of a plan."""
    plan = prepared.plan
    config = tuning.forced() or tuned(prepared, whole_row)
    if config is None and INTERPRETED.value:
        # An interpreted program costs the same for one row and for many: those of the scales alone belong to the same.
        config = tuning.interpreted(max(plan.rows, plan.written_rows), plan.data_width, least_tile(plan))
    config = config or untuned(plan, whole_row)
    experts = plan.experts if plan.with_offsets else 0
    return tiling_of(plan.hidden_size, plan.data_width, config, plan.mean_group, experts, has_few(plan)), config


def untuned(plan: Plan, whole_row: bool) -> tuning.RowConfig:
    """The configuration of a call that no table knows. `whole_row`: a program must see its rows entirely."""
    pairs = plan.producer.parts == 2 and not plan.producer.moments
    return tuning.heuristic(plan.data_width, least_tile(plan), whole_row, pairs and has_few(plan), pairs)


def tuned(prepared: Prepared, whole_row: bool) -> tuning.RowConfig | None:
    """The configuration of a table or, where that is asked for, of a search; of rows cut as they are tuned only."""
    plan = prepared.plan
    if whole_row != needs_whole_row(plan.producer, plan.scheme):
        return None
    key = key_of(prepared)
    found = tables.find(plan.device, key)
    if found is None and tuning.AUTOTUNE and tables.gpu_of(plan.device) is not None:
        from tq.bench import search  # which launches

        found = search.at_first_sight(prepared, key)
    return found


def key_of(prepared: Prepared) -> tuning.Key:
    """What the configuration of a call is tuned for."""
    plan, scheme = prepared.plan, prepared.plan.scheme
    moments = len(plan.producer.moments)
    return tuning.Key(
        "quantize_rows",
        moments,
        plan.mean_group,
        # Without y, where it is returned: that must not change how a mean is summed.
        bytes_of_rows(prepared.bound.args, plan.hidden_size),
        f"{scheme.granularity}{scheme.group or ''}",
        plan.data_width,
        "any" if moments else "few" if has_few(plan) else "many",
    )


def bytes_of_rows(args: Any, hidden_size: int) -> int:
    """Bytes of an element in the rows that a producer reads and writes; what all rows share does not count."""
    if isinstance(args, Rows):
        return args.data.shape[1] // hidden_size * args.data.element_size()
    return sum(bytes_of_rows(each, hidden_size) for each in args) if isinstance(args, tuple) else 0


def has_few(plan: Plan) -> bool:
    return plan.rows * plan.data_width <= tuning.FEW_ELEMENTS


def least_tile(plan: Plan) -> int:
    """The narrowest tile: a group is never cut."""
    return max(plan.scheme.group, plan.mean_group)


@lru_cache
def tiling_of(
    hidden_size: int,
    data_width: int,
    config: tuning.RowConfig,
    mean_group: int = 0,
    experts: int = 0,
    early: bool = False,
) -> Tiling:
    block_n = max(config.block_n, mean_group)
    programs = -(-data_width // (config.tiles * block_n))
    sizes = hidden_size, data_width, config.block_m, block_n, config.tiles, programs, mean_group
    return Tiling(*map(constant, (*sizes, experts, next_power_of_2(max(experts, 1)), early)))
