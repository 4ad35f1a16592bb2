"""`Engine`: the interface of a backend to `Actor`, `Critic` and `ActorCritic`, and the data that pass through it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

import ckpt
from ckpt.layout import Change
from ckpt.transfer import read_companions, whole_adapters
from parallel_layers import PackedSequence
from parallel_layers.data import SharedPrefixes
from parallel_layers.device import GPU, gpu
from parallel_layers.head import Distillation, SamplingMask
from parallel_layers.linear import LowRank
from parallel_layers.model import without_adapters
from parallel_layers.module import crc_seed
from parallel_layers.moe import RouterReplay
from parallel_models.engine.checkpoint import longest_sequence
from parallel_models.engine.grid import Grid
from parallel_models.engine.options import EngineOptions
from parallel_models.engine.vision import Images, Visual
from parallel_models.generation.decoding import CacheOptions, Decoding, Progress, unwatched
from parallel_models.generation.session import GenerationSession
from parallel_models.optimizers.interface import Optimizer, OptimizerOptions

Role = Literal["causal_lm", "value", "causal_lm_with_value"]

# The outputs of a model after each token of a packed batch, each [T] fp32 with padding: the log-prob of the next token
# of the sequence (0 at its end) and the entropy of that choice, the value of the state, or all three. A value model of
# several labels has an output for each label.
Outputs = tuple[Tensor, ...]

# The names of a role's outputs.
OUTPUTS: dict[Role, tuple[str, ...]] = {
    "causal_lm": ("log_probs", "entropy"),
    "value": ("values",),
    "causal_lm_with_value": ("log_probs", "entropy", "values"),
}


class SharedPrompt(NamedTuple):
    """A prompt of `length` tokens, and the sequences of a micro-batch, by number, that begin with it."""

    length: int
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences, and everything beside the weights that a pass over them depends on.

    Attributes:
        packed: The tokens, padding included.
        temperature: The logits are divided by this number.
        replay: Records where routers send the tokens of `packed`, or says where they go. None: the routers choose.
        sampling_mask: Row t has the tokens that the token after token t of `packed` was drawn from; log-probs and
            entropies are those of the distribution over them. None: the whole vocabulary.
        visual: The images of each sequence of `packed`; empty without any.
        prompts: The prompts that the sequences share, each sequence under one; empty: nothing is shared.
        shared: Engines put these sequences here with each prompt once; `packed` is then this pack, padded.
        distillation: The model returns the divergence of the token after each of `packed` as its last output.
        returns_states: The model returns the final hidden states `[T, H]` as its only output.
        top_n: The model returns the statistics of the token after each of `packed` as its only output, `[T, 3 + 2 N]`:
            the columns of `parallel_layers.head.TokenStatistics` with the N most likely tokens. None: the role's
            outputs.
        values_only: A language model with a value head returns the values alone, and computes no log-probs.
        inputs: Anything that the loss reads; engines pass it on.
    """

    packed: PackedSequence
    temperature: float = 1.0
    replay: RouterReplay | None = None
    sampling_mask: SamplingMask | None = None
    visual: Visual = ()
    prompts: tuple[SharedPrompt, ...] = ()
    shared: SharedPrefixes | None = None
    distillation: Distillation | None = None
    returns_states: bool = False
    top_n: int | None = None
    values_only: bool = False
    inputs: Any = None


# (micro-batch, its outputs) -> scalar
Loss = Callable[[MicroBatch, Outputs], Tensor]


@dataclass(frozen=True)
class Shards:
    """The parameters of this rank, and the parts of the checkpoint's tensors that they hold.

    `chunks` has the place of each pipeline chunk of the rank, and its parameters by the layout's local names, which
    differ between chunks. Parameters sharded by FSDP2 are DTensors. The parameters named in `transposed` have the last
    two dimensions of the layout's tensors exchanged.
    """

    layout: ckpt.Layout
    chunks: Sequence[tuple[ckpt.Place, Mapping[str, Tensor]]]
    transposed: Collection[str] = ()

    @property
    def places(self) -> list[ckpt.Place]:
        """The places of all chunks."""
        return [place for place, _ in self.chunks]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters of all chunks, by local name."""
        return {name: parameter for _, tensors in self.chunks for name, parameter in tensors.items()}

    def exchanged(self, name: str, tensor: Tensor) -> Tensor:
        """Return a parameter, or a tensor of its optimizer state, as a view in the layout's order, or back."""
        turns = name in self.transposed and tensor.dim() > 1
        return tensor.detach().transpose(-1, -2) if turns else tensor


class Engine(ABC):
    """A loaded model on a grid. Every rank of the grid calls each method, in the same order.

    Ranks that differ in tp, cp or pp alone pass the same micro-batches; data-parallel ranks pass each their own, in
    equal number. After a call a recording replay holds the experts of all tokens and layers, on every rank.

    Attributes:
        module: The parameters of this rank.
        grid: The grid of the model.
        source: The folder of the loaded checkpoint.
        companions: The folder's tokenizer, processor and generation files, on the first rank.
        backend, options: The backend's name, and the options of loading.
        vocab_size: The size of the vocabulary without padding.
        tokens_multiple_of: The tokens of a packed batch must be a multiple of this number.
        micro_batches_multiple_of: The micro-batches of a call must be a multiple of this number.
        routed_layers: The numbers of the layers with routed experts.
        num_experts: The experts of each of these layers; 0 in a dense model.
        longest_sequence: Maximum number of tokens in a sequence, see `parallel_models.engine.longest_sequence`.
        shares_prefixes: Whether the engine computes `MicroBatch.prompts` once.
        takes_sampling_mask: Whether the engine accepts `MicroBatch.sampling_mask`.
        distils: Whether the engine accepts `MicroBatch.distillation` and `returns_states`.
        lists_tokens: Whether the engine accepts `MicroBatch.top_n`.
        separates_values: Whether the engine accepts `MicroBatch.values_only`.
        num_labels: The number of labels of the value head, with an output each.
        further_outputs: The outputs that the loss of `forward_backward` gets besides the role's outputs: the log-probs
            of the tokens 2, 3, ... places after each token.
        mtp_loss_scaling_factor: See `EngineOptions`.
        images: The checks and positions of images; None: a model of text alone.
        progress: Called while an actor or a critic works, with the counts "responses" and "tokens" of a generation and
            "micro-batches" of an update, of this rank. A program that shows them sets it.
        session: The session that `GenerationOptions.keep_cache` keeps between two calls.
        updates: Number of updates so far in which adapters dropped inputs. It seeds the draws; a resumed run sets it.
    """

    module: nn.Module
    grid: Grid
    source: str
    companions: Mapping[str, bytes]
    backend: str
    options: EngineOptions
    vocab_size: int
    tokens_multiple_of: int = 1
    micro_batches_multiple_of: int = 1
    routed_layers: Sequence[int]
    num_experts: int
    longest_sequence: int | None = None
    shares_prefixes: bool = False
    takes_sampling_mask: bool = True
    distils: bool = False
    lists_tokens: bool = False
    separates_values: bool = False
    num_labels: int = 1
    further_outputs: int = 0
    mtp_loss_scaling_factor: float = 0.0
    images: Images | None = None
    progress: Progress = staticmethod(unwatched)
    session: GenerationSession | None = None
    updates: int = 0

    def require_visual(self, sequences: Sequence[Tensor], visual: Visual) -> None:
        """Raise ValueError unless the model takes these images, and each has the tokens that its size asks for."""
        if self.images is not None:
            self.images.require(sequences, visual)
        elif visual:
            raise ValueError(
                "the batch has images, and this model sees none: load a vision-language model with backend='parallel' "
                "or backend='transformers' (backend='megatron' has its text part), or leave the images out"
            )

    def prompt_images(self, tokens: Tensor, visual: Any) -> tuple[Any, int]:
        """Return a prompt's images with the kinds of its tokens `[L]`, and how many positions more than L it takes.

        The number is below 0 for most images.

        Raises:
            ValueError: The last token belongs to an image.
        """
        assert self.images is not None  # `require_visual` has refused the images
        return self.images.of_prompt(tokens, visual)

    def loaded(self, backend: str, checkpoint: ckpt.Checkpoint, options: EngineOptions) -> Self:
        """Record the backend, the source and the options of an engine; every rank calls this once.

        The files that saves copy are read now, because the folder may be gone by then; the first rank writes them.
        """
        self.backend, self.options, self.source = backend, options, str(checkpoint.path)
        self.longest_sequence = longest_sequence(checkpoint)
        is_first = self.grid.everyone is None or self.grid.everyone.rank() == 0
        self.companions = ckpt.agree(lambda: read_companions(checkpoint.path) if is_first else {}, self.grid.everyone)
        return self

    @abstractmethod
    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Outputs]:
        """Return the outputs of every micro-batch, on every rank, without a graph."""

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> None:
        """Add the gradient of the sum of the losses over all micro-batches and all data-parallel ranks.

        Every rank of the last pipeline stage calls the loss once for each micro-batch, with whole inputs `[T]`. When
        this method returns, every gradient is complete. The loss must not raise, which would leave other ranks waiting.
        """

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop this rank's gradients, also after a call that raised or was interrupted."""

    @abstractmethod
    def build_optimizer(self, options: OptimizerOptions) -> Optimizer:
        """Return an optimizer of the parameters."""

    @abstractmethod
    def shards(self) -> Shards:
        """Return the parameters of this rank, as parts of the tensors of a Hugging Face checkpoint."""

    def stored(self) -> Shards:
        """Return the tensors as saved files hold them: the parameters, or views of them."""
        return self.shards()

    def streamed(self) -> Shards:
        """Return the tensors as inference engines take them, in the order of published checkpoints."""
        return self.stored()

    def training_shards(self) -> Shards:
        """Return the tensors of a training checkpoint: the adapters if the model has adapters, else the parameters."""
        return self.adapters() or self.shards()

    @abstractmethod
    def decoding(self, options: CacheOptions) -> AbstractContextManager[Decoding]:
        """Generate without gradients; cp ranks may run different forward passes, unless they share experts."""

    def adapters(self) -> Shards | None:
        """Return the adapters of this rank, and the head that is trained with them; None: all weights are trained."""
        return None

    def merging(self) -> Change | None:
        """Return the change of the weights that merges the adapters; None without adapters. Every rank calls this."""
        if (adapters := self.adapters()) is None:
            return None
        assert isinstance(adapters.layout, ckpt.AdapterLayout)
        tensors = [chunk for _, chunk in adapters.chunks]
        return adapters.layout.merging(whole_adapters(tensors, adapters.layout, adapters.places, self.grid.everyone))

    def without_adapters(self) -> AbstractContextManager[None]:
        """Compute with the base alone inside the block."""
        return without_adapters(self.module)

    def adapter_dropouts(self) -> list[nn.Module]:
        """Return the modules that drop inputs of adapters in training mode."""
        return [module for module in self.module.modules() if isinstance(module, LowRank) and module.dropout]

    @contextmanager
    def dropout(self) -> Iterator[None]:
        """Let adapters drop inputs inside the block, with draws that differ between dp and cp ranks alone."""
        dropping = self.adapter_dropouts()
        if not dropping:
            yield
            return
        self.updates += 1
        seed = getattr(self.options.lora, "seed", 0)
        key = crc_seed(seed, self.updates, self.grid.rank("dp"), self.grid.rank("cp"))
        on_gpu = self.grid.device.type == GPU
        with torch.random.fork_rng(devices=[self.grid.device] if on_gpu else []):
            torch.default_generator.manual_seed(key)
            if on_gpu:
                gpu.manual_seed(key)
            for module in dropping:
                module.train()
            try:
                yield
            finally:
                for module in dropping:
                    module.eval()

    def save_adapter(self, path: str | os.PathLike[str]) -> None:
        """Write the adapters as PEFT does, atomically."""
        adapters = self.adapters()
        assert adapters is not None
        assert isinstance(adapters.layout, ckpt.AdapterLayout)
        tensors = [chunk for _, chunk in adapters.chunks]
        ckpt.save_adapter(path, tensors, adapters.layout, adapters.places, group=self.grid.everyone)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a Hugging Face checkpoint atomically, with the config and tokenizer files of the loaded checkpoint.

        Adapters are merged.
        """
        shards = self.stored()
        tensors = [{name: tensor.detach() for name, tensor in chunk.items()} for _, chunk in shards.chunks]
        ckpt.save_hf(
            path, tensors, shards.layout, shards.places, dtype=self.options.save_dtype,
            group=self.grid.everyone, copy_from=self.companions, change=self.merging(),
        )  # fmt: skip
