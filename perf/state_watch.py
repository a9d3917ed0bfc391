"""What an engine does to its recurrent states, seen from outside: which slots a rounding writes and what into them,
whether the states that vLLM's own kernels are then given are rounded ones, and whether a step that rounds them itself
comes to what vLLM's kernel makes of rounded ones."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

LARGEST = {"int8": 127.0, "int8_narrow": 127.0, "fp8_e4m3": 448.0}
QWEN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
KIMI = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"
# What reads states out of the cache by slot, and what is given gathered ones.
BY_SLOT = {
    QWEN: ("fused_recurrent_gated_delta_rule_packed_decode", "fused_sigmoid_gating_delta_rule_update"),
    KIMI: ("fused_recurrent_kda_packed_decode", "fused_recurrent_kda"),
}
# The step that may stand in the place of one of them.
INSIDE = {"gdn_decode": (QWEN, BY_SLOT[QWEN][0]), "kda_decode": (KIMI, BY_SLOT[KIMI][0])}
GATHERED = {QWEN: ("fla_chunk_gated_delta_rule", "fi_chunk_gated_delta_rule"), KIMI: ("chunk_kda_with_fused_gate",)}


def rounded(states: torch.Tensor, code: str) -> torch.Tensor:
    """States [..., values, keys] with one scale a head, quantized and dequantized as ModelOpt does it with torch."""
    amax = states.abs().amax((-2, -1), keepdim=True)
    if code == "fp8_e4m3":
        scale = torch.where(amax <= 2.0**-24, 1.0, amax).reciprocal() * 448.0
        codes = (states * scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return codes.to(torch.float32) * scale.reciprocal()
    scale = torch.full_like(amax, LARGEST[code]) / torch.where(amax <= 2.0**-24, 1.0, amax)
    codes = (states * torch.where(amax <= 2.0**-24, 0.0, scale)).round().clamp(-127, 127)
    return torch.where(codes == 0, torch.copysign(torch.zeros_like(states), states), codes / scale)


def given_to(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a kernel of vLLM by name."""
    return inspect.signature(getattr(function, "fn", function)).bind(*args, **kwargs).arguments


def slots_in(given: dict[str, Any]) -> torch.Tensor:
    return given["ssm_state_indices"] if "ssm_state_indices" in given else given["state_indices"]


def rows_of(slots: torch.Tensor, present: torch.Tensor | None, accepted: torch.Tensor | None) -> list[int]:
    """The slots of a call that are ones."""
    columns = slots.cpu() if accepted is None else slots.cpu()[torch.arange(len(slots)), accepted.cpu().long() - 1]
    here = [True] * len(columns) if present is None else present.tolist()
    return [slot for slot, exists in zip(columns.tolist(), here, strict=True) if slot > 0 and exists]


class Watch:
    """Counts of what was seen, and of what must not be: those named `wrong_...`."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.counts: dict[str, int] = defaultdict(int)

    def rounding(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`tq.state.qdq_`, compared on every slot of the cache with ModelOpt's arithmetic."""

        def watched(state: torch.Tensor, slots: torch.Tensor, **options: Any) -> Any:
            present, accepted = options["has_initial_state"], options["num_accepted_tokens"]
            want = state.clone()
            rows = rows_of(slots, present, accepted)
            want[rows] = rounded(want[rows], self.code)
            result = original(state, slots, **options)
            differ = (state.view(torch.int32) != want.view(torch.int32)).flatten(1).sum(1)
            active = torch.zeros(len(differ), dtype=torch.bool, device=differ.device)
            active[rows] = True
            kind = "prefill" if present is not None else "decode" if accepted is None else "spec"
            self.counts[f"roundings_{kind}"] += 1
            self.counts["slots_rounded"] += len(rows)
            self.counts["prompts_continued"] += len(rows) if present is not None else 0
            self.counts["later_columns"] += 0 if accepted is None else int((accepted > 1).sum())
            self.counts["wrong_elements_of_active_slots"] += int(differ[active].sum())
            self.counts["wrong_elements_of_other_slots"] += int(differ[~active].sum())
            return result

        return watched

    def look(self, name: str, states: torch.Tensor) -> None:
        """States that a native kernel reads: rounding them again changes no element by more than its last bits."""
        self.counts[f"read_by_{name}"] += len(states)
        off = (rounded(states, self.code) - states).abs() > states.abs() * 2.0**-21
        self.counts["wrong_elements_read"] += int(off.sum())
        self.counts["nonzero_states_read"] += int(states.flatten(1).any(1).sum())

    def inside(self, original: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
        """`tq.state.gdn_decode` or `kda_decode`, compared with vLLM's kernel on what ModelOpt's arithmetic rounded.

        Both add up 128 products S k of fp32, in another order; each sum is off by 2^-20 of |S| at most (16 roundings of
        2^-24, |k| = 1), and what is stored by a last bit more. Outputs are rounded to bf16 after that.
        """

        def watched(*args: Any, code: str, granularity: str, **kwargs: Any) -> Any:
            given = given_to(native, args, kwargs)
            states, rows = given["initial_state"], rows_of(slots_in(given), None, None)
            before = states.clone()
            theirs = before.clone()
            theirs[rows] = read = rounded(theirs[rows], self.code)
            changed = {"initial_state": theirs}
            if given.get("out") is not None:
                changed["out"] = torch.zeros_like(given["out"])
            want, _ = native(**(given | changed))
            result = original(*args, **kwargs, code=code, granularity=granularity)
            length = read.norm(dim=-1) + theirs[rows].norm(dim=-1)
            off = (states[rows] - theirs[rows]).abs() > length[..., None] * 2.0**-20
            other = torch.ones(len(states), dtype=torch.bool, device=states.device)
            other[rows] = False
            differ = states.view(torch.int32) != before.view(torch.int32)
            live = slots_in(given) > 0
            ours, want = (each.float().view(len(live), *each.shape[-2:]) for each in (result[0], want))
            limit = want[live].abs() * 2.0**-7 + length * 2.0**-19 * states.shape[-1] ** -0.5
            self.counts["roundings_inside"] += 1
            self.counts["nonzero_states_read"] += int(read.flatten(1).any(1).sum())
            self.counts["elements_after_steps"] += off.numel()
            self.counts["elements_not_of_the_same_bits"] += int((states[rows] != theirs[rows]).sum())
            self.counts["wrong_elements_after_steps"] += int(off.sum())
            self.counts["wrong_elements_of_other_slots"] += int(differ[other].sum())
            self.counts["wrong_outputs"] += int(((ours[live] - want[live]).abs() > limit).sum())
            self.counts["wrong_outputs"] += int((ours[~live] != want[~live]).sum())
            return result

        return watched

    def by_slot(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            given = given_to(original, args, kwargs)
            slots = slots_in(given)
            accepted = given.get("num_accepted_tokens")
            if given.get("cu_seqlens") is not None:  # of the requests that there are
                slots = slots[: len(given["cu_seqlens"]) - 1]
            accepted = None if accepted is None else accepted[: len(slots)]
            self.look(name, given["initial_state"][rows_of(slots, None, accepted)])
            return original(*args, **kwargs)

        return watched

    def gathered(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.look(name, kwargs["initial_state"])
            return original(*args, **kwargs)

        return watched

    @contextmanager
    def __call__(self, model: torch.nn.Module) -> Any:
        """Watches the calls of an eager engine; counts the steps of the model too."""
        from tq.contract import state, state_decode

        def step(*_: Any) -> None:
            self.counts["steps"] += 1

        handle = model.register_forward_pre_hook(step)
        with ExitStack() as stack:
            stack.callback(handle.remove)
            stack.enter_context(patch.object(state, "qdq_", self.rounding(state.qdq_)))
            for step, (module, name) in INSIDE.items():
                native = getattr(import_module(module), name)
                watched = self.inside(state_decode.STEPS[step], getattr(native, "tq_original", native))
                stack.enter_context(patch.dict(state_decode.STEPS, {step: watched}))
            for names, wrap in ((BY_SLOT, self.by_slot), (GATHERED, self.gathered)):
                for module, functions in names.items():
                    for name in functions:
                        owner, attribute = import_module(module), name
                        if hasattr(getattr(owner, name), "tq_original"):  # a call may leave the rounding to a step
                            owner, attribute = getattr(owner, name), "tq_original"
                        stack.enter_context(patch.object(owner, attribute, wrap(name, getattr(owner, attribute))))
            yield
