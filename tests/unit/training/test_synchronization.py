"""No training step synchronizes with the device.

A simulated device keeps its tensors on the CPU and records what would wait for a GPU: values read
back, blocking copies, and operations whose result has a data-dependent size. With a GPU, CUDA
itself checks the same steps.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from captioner.data.batches import Batch
from captioner.hardware import upload
from captioner.inference.torch_engine import DecoderStepper
from captioner.options import SearchOptions
from captioner.search.search import search
from captioner.search.words import SearchTokens
from captioner.text.vocabulary import START
from captioner.training.loop import Forward, Trainer
from captioner.training.run_folder import RunFolder
from captioner.training.setup import prepare

DEVICE = torch.device("meta")
"""The name of the simulated device: autograd runs its backward pass like a CPU's."""

SYNCHRONIZING = {
    torch.ops.aten._local_scalar_dense.default: "a value is read",
    torch.ops.aten.nonzero.default: "the size of the result is data-dependent",
    torch.ops.aten.masked_select.default: "the size of the result is data-dependent",
    torch.ops.aten._unique2.default: "the size of the result is data-dependent",
    torch.ops.aten.equal.default: "a value is read",
    torch.ops.aten.multinomial.default: "a GPU checks the values first",
}


class OnDevice(Tensor):
    """A tensor on the simulated device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            held.shape,
            held.stride(),
            held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the device outside of PretendedDevice")


class SimulatedDevice(TorchDispatchMode):
    """Mode that runs operations on the simulated device and records those that wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        held = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnDevice)]
        target = kwargs.get("device")
        moved = func is torch.ops.aten._to_copy.default and target is not None
        if func in SYNCHRONIZING and held:
            self._record(func, SYNCHRONIZING[func])
        if func is torch.ops.aten.index.Tensor and held:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype == torch.bool for index in indices):
                self._record(func, "the size of the result is data-dependent")
            if not all(isinstance(index, OnDevice) for index in indices):
                self._record(func, "an index on the CPU is copied")
        if moved and bool(held) != (target == DEVICE):
            back = bool(held)
            if back or not kwargs.get("non_blocking"):
                self._record(func, f"a copy {'from' if back else 'to'} the device")
        if func is torch.ops.aten.copy_.default and len(held) == 1:
            self._record(func, "a copy between the CPU and the device")
        on_device = target == DEVICE if target is not None else bool(held)
        if target == DEVICE:
            kwargs["device"] = torch.device("cpu")
        plain_args, plain_kwargs = tree_map_only(OnDevice, lambda t: t.held, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable and args and result is plain_args[0]:
            return args[0]
        return tree_map_only(Tensor, OnDevice, result) if on_device else result

    def _record(self, func: Any, why: str) -> None:
        frames = [f for f in traceback.extract_stack() if "captioner/" in f.filename]
        where = f" in {'/'.join(f.name for f in frames)}:{frames[-1].lineno}" if frames else ""
        self.syncs.append(f"{func}: {why}{where}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    class Autocast(torch.autocast):
        def __init__(self, kind: str, *args: Any, **options: Any) -> None:
            super().__init__("cpu" if kind == DEVICE.type else kind, *args, **options)

    monkeypatch.setattr(torch, "autocast", Autocast)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": False)
    with SimulatedDevice() as mode:
        yield mode


@pytest.mark.parametrize(
    "sync",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.cpu(),
        lambda x: x[torch.tensor([0])],
        lambda x: torch.tensor([1.0]).to(x.device),
        lambda x: x.softmax(0).multinomial(1),
    ],
)
def test_synchronizations_are_recorded(device: SimulatedDevice, sync: Callable[[Tensor], object]):
    x = upload(torch.rand(3), DEVICE)
    assert device.syncs == []
    sync(x)
    assert device.syncs


def move(trainer: Trainer, device: SimulatedDevice) -> None:
    """Move a trainer to the simulated device."""
    trainer.model.to(DEVICE)
    trainer.device = trainer.processes.device = DEVICE
    trainer.sums.values = trainer.sums.values.to(DEVICE)
    if trainer.state.average is not None:
        trainer.state.average.module.to(DEVICE)
    trainables = [p for p in trainer.model.parameters() if p.requires_grad]
    trainer.state.optimizer = torch.optim.AdamW(trainables, lr=1e-3)
    trainer.state.optimizer.param_groups[0]["peak_lr"] = 1e-3
    trainer.loss_of = Forward(trainer.objective, trainer.model, trainer.precision)
    device.syncs.clear()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"training": {"ema_decay": 0.9, "label_smoothing": 0.1, "micro_batch": 2}},
        {"decoder": {"selection": "hard"}},
        {"decoder": {"order": "luong", "attention": "general"}},
        {"decoder": {"attention": "multi_head", "attention_dim": 8, "heads": 2}},
        {"encoder": {"finetune_from": "layer4"}},
    ],
    ids=str,
)
def test_no_step_synchronizes(
    configure: Any, tmp_path: Path, device: SimulatedDevice, changes: dict[str, Any]
):
    config = configure(**changes)
    trainer = Trainer(prepare(config), RunFolder(tmp_path / "run", config))
    batches: list[Batch] = list(trainer.source.batches(0, 0))
    move(trainer, device)
    trainer.model.train()
    before = trainer.model.decoder.word_output.weight.detach().clone()
    for batch in batches:
        trainer.step(batch)
        trainer.progress.step += 1
    assert device.syncs == []
    after = trainer.model.decoder.word_output.weight.detach()
    assert not torch.equal(before.held, after.held)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "options",
    [
        SearchOptions(beam_size=3, max_length=6),
        SearchOptions(beam_size=1, max_length=6, temperature=1.0, num_captions=2),
        SearchOptions(beam_size=4, beam_groups=2, max_length=6, block_repeats=True),
        SearchOptions(beam_size=3, max_length=6, min_length=2, block_ngrams=2, guard_endings=True),
        SearchOptions(beam_size=2, max_length=6, forced_words=("dog",)),
        SearchOptions(
            beam_size=1, max_length=6, temperature=1.0, num_captions=2, top_k=6, top_p=0.9
        ),
    ],
    ids=str,
)
def test_search_synchronizes_once_per_step(
    tiny_model: Any, device: SimulatedDevice, options: SearchOptions
):
    words = SearchTokens(
        forced=(6,) if options.forced_words else (), banned=(9,), repeatable=(5,), bad_endings=(7,)
    )
    features = torch.rand(5, 4, 96)
    expected = search(
        DecoderStepper(tiny_model.decoder, tiny_model.decoder.memory(features)), options, words
    )
    with torch.inference_mode(False), torch.no_grad():
        decoder = tiny_model.decoder.to(DEVICE)
        starts = upload(torch.full((5,), START), DEVICE)
        stepper = DecoderStepper(decoder, decoder.memory(upload(features, DEVICE)), starts)
        device.syncs.clear()
        found = search(stepper, options, words)
    assert [[h.tokens for h in photo] for photo in found] == [
        [h.tokens for h in photo] for photo in expected
    ]
    in_steps = [sync for sync in device.syncs if "_trace" not in sync]  # except reading the results
    assert len(in_steps) <= options.max_length


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_no_step_synchronizes_on_cuda(configure: Any, tmp_path: Path):
    config = configure(decoder={"selection": "hard"})
    trainer = Trainer(prepare(config), RunFolder(tmp_path / "run", config))
    batches = list(trainer.source.batches(0, 0))
    trainer.model.train()
    trainer.step(batches[0])  # loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step(batches[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
