"""`backend="megatron"`: Megatron-Core's GPTModel, schedules and optimizer, through megatron-utils.

Megatron-Core keeps its process groups in global state. Each call here enters that state for this engine's grid and
leaves it again, so actors and critics on different grids live in one process; inside a `megatron_grid` of the caller's
own nothing here can be called. It computes on GPUs; on a CPU only inside `megatron_utils.testing.cpu_stand_in`, which
tests and demonstrations enter themselves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ckpt
from ckpt.agreement import agree, all_gather_json
from megatron_utils import MegatronGrid, megatron_grid
from megatron_utils.gpt import PackedGPTModel, build_gpt, hf_config
from megatron_utils.optimizer import Optimizer, OptimizerConfig, wrap_data_parallel
from megatron_utils.optimizer.build import chained
from megatron_utils.pipeline_parallel import run_schedule
from megatron_utils.router_replay import complete_recordings, moe_layers
from megatron_utils.testing import stand_in_is_active
from parallel_layers import LogProbs, PackedSequence, next_token_labels
from parallel_layers.moe import RouterReplay
from rl_models.backends.engine import EngineOptions, Loss, NextLogits, Outputs, Role
from rl_models.backends.options import RouterLosses
from rl_models.backends.shards import Shards
from rl_models.backends.stored import stored_dtype
from rl_models.grid import Grid
from rl_models.optimizer import OptimizerOptions

PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
# What parallel-layers calls the forms of attention over divided sequences.
CONTEXT_PARALLEL = {"ring": "p2p", "ulysses": "a2a"}


class MegatronEngine:
    """A GPTModel divided over tp, pp (with virtual stages), cp and ep, and whole on every data-parallel rank.

    Attributes:
        chunks: this rank's pipeline chunks.
        layout, places: where they stand in a checkpoint; a place for each chunk.
        routed_layers: the numbers of the layers with routed experts; none in a dense model.
        num_experts: of each of these layers.
    """

    def __init__(
        self,
        chunks: Sequence[PackedGPTModel],
        layout: ckpt.Layout,
        places: Sequence[ckpt.Place],
        grid: Grid,
        enter: Callable[[], AbstractContextManager[MegatronGrid]],
        source: str,
    ) -> None:
        self.module: nn.Module = nn.ModuleList(chunks)
        self.chunks, self.layout, self.places = list(chunks), layout, list(places)
        self.grid, self.source, self._enter = grid, source, enter
        self.vocab_size = chunks[0].true_vocab_size
        self.tokens_multiple_of = chunks[0].tokens_multiple_of
        self.micro_batches_multiple_of = grid.dims.pp if len(chunks) > 1 else 1
        self.routed_layers = moe_layers(chunks[0].config)
        self.num_experts = int(chunks[0].config.num_moe_experts or 0)
        self._replays: Sequence[RouterReplay] | None = None
        self._trained: list[Any] | None = None
        self._has_gradients = False

    @contextmanager
    def entered(self) -> Iterator[MegatronGrid]:
        """Megatron's global state for this grid.

        Raises:
            ValueError: the device is not the current one, or a CPU without the stand-in.
            RuntimeError: inside another `megatron_grid`.
        """
        check_device(self.grid.device)
        with self._enter() as megatron:
            yield megatron

    def trained(self, megatron: MegatronGrid) -> list[Any]:
        """The chunks with buffers for their gradients, made when they are first needed: a reference model has none."""
        if self._trained is None:
            self._trained = wrap_data_parallel(self.chunks, megatron)
        return self._trained

    def forward(self, micro_batches: Sequence[PackedSequence], *, temperature: float = 1.0) -> list[Outputs]:
        """The outputs of every micro-batch, on every rank, without a graph."""
        with self.entered() as megatron, torch.no_grad():
            outputs = run_schedule(self.chunks, micro_batches, megatron, **self._inputs(micro_batches, temperature))
            self._complete_recordings(micro_batches, megatron)
        assert outputs is not None
        return [_outputs(output) for output in outputs]

    def forward_backward(
        self, micro_batches: Sequence[PackedSequence], loss: Loss, *, temperature: float = 1.0
    ) -> None:
        """Add the gradient of the losses.

        An error of the loss would leave the other stages waiting: the step goes on with nothing more to learn, and then
        every rank raises.
        """
        errors: list[Exception] = []
        dp = self.grid.dims.dp

        def total(output: Any, number: int) -> Tensor:
            outputs = _outputs(output)
            if not errors:
                try:
                    # Megatron averages over the data-parallel ranks; the gradient here is their sum.
                    return loss(number, outputs) * dp
                except Exception as error:
                    errors.append(error)
            return torch.stack([column.sum() for column in outputs]).sum() * 0

        with self.entered() as megatron:
            chunks = self.trained(megatron)
            # Gradients are completed over the ranks at the end of a schedule, once: what an earlier call has completed
            # waits outside.
            buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
            earlier = [buffer.grad_data.clone() for buffer in buffers] if self._has_gradients else []
            for chunk in chunks:
                chunk.zero_grad_buffer()
            run_schedule(
                chunks, micro_batches, megatron, loss=total, broadcast=False, **self._inputs(micro_batches, temperature)
            )
            for buffer, gradient in zip(buffers, earlier, strict=bool(earlier)):
                buffer.grad_data.add_(gradient)
            self._complete_recordings(micro_batches, megatron)
        messages = all_gather_json(str(errors[0]) if errors else None, self.grid.everyone)
        self._has_gradients = all(message is None for message in messages)
        if errors:
            raise errors[0]
        for rank, message in enumerate(messages):
            if message is not None:
                raise ValueError(f"rank {rank}: {message}")

    def _inputs(self, micro_batches: Sequence[PackedSequence], temperature: float) -> dict[str, Any]:
        """What the schedule gives the model beside the micro-batches."""
        inputs: dict[str, Any] = {"routing": self._replays}
        if self.layout.role == "causal_lm":
            inputs |= {"labels": [next_token_labels(packed) for packed in micro_batches], "temperature": temperature}
        return inputs

    @contextmanager
    def routing(self, replays: Sequence[RouterReplay]) -> Iterator[None]:
        """Route the micro-batches of one call by `replays`; what records holds all layers afterwards, on every rank."""
        self._replays = replays
        try:
            yield
        finally:
            self._replays = None

    def _complete_recordings(self, micro_batches: Sequence[PackedSequence], megatron: MegatronGrid) -> None:
        if self._replays is not None and self._replays[0].recording:
            complete_recordings(self._replays, micro_batches, self.chunks[0].config, megatron)

    def build_optimizer(self, options: OptimizerOptions) -> MegatronOptimizer:
        """Megatron's AdamW."""
        return MegatronOptimizer(self, options)

    def drop_gradients(self) -> None:
        """What the next `forward_backward` adds to is zero."""
        self._has_gradients = False
        for parameter in self.module.parameters():
            parameter.grad = None

    def shards(self) -> Shards:
        """The parameters of this rank, and the biases by which its routers choose."""
        return Shards(
            self.layout,
            [(place, _loaded(chunk)) for place, chunk in zip(self.places, self.chunks, strict=True)],
        )

    @contextmanager
    def decoding(self, num_sequences: int, max_length: int) -> Iterator[NextLogits]:
        """Decode by running the whole sequences again for every token, on all ranks that share them alike.

        Experts that are divided over data-parallel ranks need all of these in every step: a rank that has finished
        takes part until the last one has.
        """
        so_far: list[Tensor] = [torch.zeros(0, dtype=torch.int64, device=self.grid.device)] * num_sequences
        together = self.grid.group("dp") if self.grid.dims.ep > 1 else None
        dummy = torch.zeros(1, dtype=torch.int64, device=self.grid.device)

        def any_goes_on(mine: bool) -> bool:
            if together is None:
                return mine
            flag = torch.tensor(float(mine), device=self.grid.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=together)
            return bool(flag)

        def next_logits(tokens: Sequence[Tensor]) -> Tensor:
            any_goes_on(True)
            so_far[:] = [torch.cat(pair) for pair in zip(so_far, tokens, strict=True)]
            running = [number for number, new in enumerate(tokens) if len(new)]
            logits = torch.zeros(num_sequences, self.vocab_size, device=self.grid.device)
            if running:
                logits[running] = self._next_logits([so_far[number] for number in running])
            else:
                self._next_logits([dummy])
            return logits

        yield next_logits
        while any_goes_on(False):
            self._next_logits([dummy])

    def _next_logits(self, sequences: Sequence[Tensor]) -> Tensor:
        """`[N, V]` fp32 after each sequence, on every rank."""
        packed = PackedSequence.from_sequences(sequences, multiple_of=self.tokens_multiple_of)
        with self.entered() as megatron, torch.no_grad():
            # Interleaving wants as many micro-batches as stages.
            batches = [packed, *[_first(packed, self.tokens_multiple_of)] * (self.micro_batches_multiple_of - 1)]
            outputs = run_schedule(self.chunks, batches, megatron, next_token=True)
            if outputs is None:
                logits = torch.empty(len(sequences), self.vocab_size, device=self.grid.device)
            else:
                assert isinstance(outputs[0], Tensor)
                logits = outputs[0].contiguous()
        if (group := self.grid.group("pp")) is not None:
            dist.broadcast(logits, group=group, group_src=group.size() - 1)
        return logits

    def save(self, path: str | os.PathLike[str]) -> None:
        """Every rank writes its own bytes; config and tokenizer files are carried over from where it was loaded."""
        tensors = [{name: x.detach() for name, x in _loaded(chunk).items()} for chunk in self.chunks]
        ckpt.save_hf(path, tensors, self.layout, self.places, group=self.grid.everyone, copy_from=self.source)


class MegatronOptimizer:
    """Megatron's AdamW, with fp32 masters of bf16 parameters; made when it is first needed.

    Megatron's own names for no decay are the vectors of these models: norms and biases.
    """

    def __init__(self, engine: MegatronEngine, options: OptimizerOptions) -> None:
        self.engine, self.options = engine, options
        self._optimizer: Optimizer | None = None
        self._holders: dict[int, torch.optim.Optimizer] = {}

    def _made(self, megatron: MegatronGrid) -> Optimizer:
        if self._optimizer is None:
            options = self.options
            config = OptimizerConfig(
                lr=options.learning_rate,
                betas=options.betas,
                eps=options.eps,
                weight_decay=options.weight_decay,
                clip_grad=options.max_grad_norm if math.isfinite(options.max_grad_norm) else None,
                precision=PRECISIONS[next(self.engine.module.parameters()).dtype],  # type: ignore[arg-type]
            )
            self._optimizer = Optimizer(self.engine.trained(megatron), megatron, config)
            # One for dense parameters, one for experts.
            self._holders = {
                id(master): part.optimizer
                for part in chained(self._optimizer.inner)
                for group in part.optimizer.param_groups
                for master in group["params"]
            }
        return self._optimizer

    def step(self, learning_rate: float) -> float:
        """Clip, step, and drop the gradients; returns the norm before clipping."""
        with self.engine.entered() as megatron:
            result = self._made(megatron).step(learning_rate)
        self.zero_grad()
        assert result.grad_norm is not None
        return result.grad_norm

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.engine.drop_gradients()

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        """`step`, `exp_avg`, `exp_avg_sq`, and of a bf16 parameter `master`."""
        master = getattr(parameter, "main_param", parameter)
        if id(master) not in self._holders:
            return {}
        slots = dict(self._holders[id(master)].state.get(master, {}))
        return slots if master is parameter else {**slots, "master": master.detach()}

    @torch.no_grad()
    def load_state(self, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
        """Take over a state; without a `master` in it, the master is the parameter as it is."""
        if self._optimizer is None:
            with self.engine.entered() as megatron:
                self._made(megatron)
        master = getattr(parameter, "main_param", parameter)
        if id(master) not in self._holders:
            return
        if master is not parameter or "master" in state:
            # What was trained in low precision may go on in fp32: its master is the parameter then.
            master.copy_(state.get("master", parameter))
        # AdamW keeps its step count on the CPU.
        self._holders[id(master)].state[master] = {
            name: value.detach().to("cpu" if name == "step" else master.device, torch.float32, copy=True)
            for name, value in state.items()
            if name != "master"
        }

    def tensors(self) -> Iterator[Tensor]:
        """The moments, and the masters that are not parameters."""
        for parameter in self.engine.module.parameters():
            yield from (value for name, value in self.state(parameter).items() if name != "step")


def load(path: str, role: Role, grid: Grid, options: EngineOptions) -> MegatronEngine:
    """Load a checkpoint; each rank reads only its own slices.

    Raises:
        ValueError: there is no process group, the device is a CPU outside `cpu_stand_in`, the architecture, an option
            or a config field is not supported, sizes do not divide over the grid, or the checkpoint is broken; on every
            rank alike.
        RuntimeError: inside a `megatron_grid`.
    """
    dims, pipeline = grid.dims, options.pipeline
    check_device(grid.device)
    if not dist.is_initialized():
        raise ValueError(
            "backend='megatron' needs a process group, also on one rank; call torch.distributed.init_process_group"
        )
    if pipeline.schedule != "1f1b":
        raise ValueError(f"backend='megatron' does not offer schedule={pipeline.schedule!r}; it offers '1f1b'")
    if options.router_losses != RouterLosses():
        raise ValueError(
            f"backend='megatron' does not offer {options.router_losses}: Megatron-Core's count padding and are scaled "
            "otherwise; use backend='parallel', or leave them out"
        )
    dtype = agree(lambda: _dtype(path, options), grid.everyone)
    virtual_stages = pipeline.virtual_stages if pipeline.virtual_stages > 1 else None
    ranks = [dist.get_rank()] if grid.mesh is None else sorted(grid.mesh.mesh.flatten().tolist())
    enter = partial(megatron_grid, dims, ranks=ranks, virtual_stages=virtual_stages)
    with enter() as megatron:

        def build() -> tuple[list[PackedGPTModel], ckpt.Layout, list[ckpt.Place]]:
            config = hf_config(path)
            split = "balanced" if pipeline.split is None else list(pipeline.split)
            layout = ckpt.layout_for(config, target="megatron", role=role, layers=split)
            places = _places(megatron, pipeline.virtual_stages)
            counts = [len(layers) for layers in layout.chunk_layers(places[0].grid)]
            extra: dict[str, Any] = {} if dims.pp == 1 else {"layers_per_stage": counts}
            if dims.cp > 1:
                extra["cp_comm_type"] = CONTEXT_PARALLEL[options.context_parallel]
            chunks = build_gpt(
                # The bias that a critic's checkpoint may have.
                {**config, "score_bias": True},
                megatron,
                role=role,
                dtype=dtype,
                sequence_parallel=options.sequence_parallel,
                **extra,
            )
            return chunks, layout, places

        chunks, layout, places = agree(build, grid.everyone)
    for chunk, place in zip(chunks, places, strict=True):
        into = {name: tensor.detach() for name, tensor in _loaded(chunk).items()}
        ckpt.load_hf(path, layout, place, into=into, group=grid.everyone)
    return MegatronEngine(chunks, layout, places, grid, enter, path)


def check_device(device: torch.device) -> None:
    """Raise ValueError where Megatron-Core cannot compute: it takes the current CUDA device for granted."""
    if stand_in_is_active():
        return
    if device.type != "cuda":
        raise ValueError(
            f"backend='megatron' does not compute on device={str(device)!r}; use a GPU, or, for tests and "
            "demonstrations on a CPU, enter megatron_utils.testing.cpu_stand_in() around everything"
        )
    if device.index not in (None, torch.cuda.current_device()):
        raise ValueError(f"{device} is not the current device; call torch.cuda.set_device({device.index}) first")


def _dtype(path: str, options: EngineOptions) -> torch.dtype:
    dtype = options.dtype or stored_dtype(path)
    if dtype not in PRECISIONS:
        raise ValueError(f"backend='megatron' does not offer dtype={dtype}; use {', '.join(map(str, PRECISIONS))}")
    return dtype


def _places(megatron: MegatronGrid, virtual_stages: int) -> list[ckpt.Place]:
    """Where each of this rank's chunks stands."""
    groups = megatron.groups
    axes = {"tp": groups.tp, "pp": groups.pp, "ep": groups.ep, "etp": groups.expt_tp}
    place = {axis: (group.rank(), group.size()) for axis, group in axes.items()}
    return [ckpt.Place(**place, vpp=(number, virtual_stages)) for number in range(virtual_stages)]


def _loaded(chunk: PackedGPTModel) -> dict[str, Tensor]:
    """What of a chunk a checkpoint holds: its parameters, and the biases by which routers choose."""
    biases = {name: buffer for name, buffer in chunk.named_buffers() if name.endswith("router.expert_bias")}
    return {**dict(chunk.named_parameters()), **biases}


def _outputs(output: LogProbs | Tensor) -> Outputs:
    if isinstance(output, Tensor):
        return (output,)
    assert output.entropy is not None
    return output.log_probs, output.entropy


def _first(packed: PackedSequence, multiple_of: int) -> PackedSequence:
    """The batch's first token alone."""
    return PackedSequence.from_sequences([packed.input_ids[:1]], multiple_of=multiple_of)
