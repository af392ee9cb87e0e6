"""What the models of a run share in a process: frozen weights, and values that `build` asks for."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cerebro.errors import InputError, one_line
from cerebro.machine.generators import preserve_generators

if TYPE_CHECKING:
    from cerebro.torch.frozen import FrozenTensor, FrozenWeights


class SharedWeightsWritten(Exception):
    """Raised at the end of a unit in which shared weights have changed."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class Unshared:
    """Makes each model's values anew, with random generators seeded by the run's seed."""

    weights: FrozenWeights | None = None

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __deepcopy__(self, memo: object) -> Unshared:
        """Return the object itself: a copied `Info` shares what the `Info` shares."""
        return self

    def __reduce__(self) -> tuple[type[Unshared], tuple[int]]:
        """Let an `Info` be sent to another process, where nothing is shared."""
        return Unshared, (self.seed,)

    def make(self, name: str, make: Callable[[], Any]) -> Any:
        text = hashlib.sha256(f"{self.seed}/{name}".encode(errors="surrogatepass"))
        while True:
            had_torch = "torch" in sys.modules
            with preserve_generators(had_torch, int.from_bytes(text.digest()[:4], "little")):
                value = make()
            if had_torch == ("torch" in sys.modules):  # else torch's generator had no seed
                return value.requires_grad_(False) if _is_module(value) else value


class Sharing(Unshared):
    """Makes each value once for all models of a run in this process, until it is closed."""

    def __init__(self, seed: int, folder: str) -> None:
        super().__init__(seed)
        self._folder = folder
        self._made: dict[str, tuple[Any, list[FrozenTensor]]] = {}
        self.writes = 0  # how often shared weights were written to
        self._is_off = False

    def make_empty(self) -> Sharing:
        return Sharing(self.seed, self._folder)

    def for_build(self, *, shares: bool) -> Unshared:
        """Return what a model that is built now gets, which `shares` with others or does not."""
        return self if shares and not self._is_off else Unshared(self.seed)

    @contextlib.contextmanager
    def share_nothing(self) -> Iterator[None]:
        """Let models that are built in this block have all weights to themselves."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    @cached_property
    def weights(self) -> FrozenWeights:  # type: ignore[override]
        from cerebro.torch.frozen import FrozenWeights

        return FrozenWeights(Path(self._folder))

    def make(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._made:
            self._made[name] = super().make(name, make), []
        value, kept = self._made[name]
        if not _is_module(value):
            return value
        try:
            again, kept[:] = self.weights.copy_module(value)
            for shared in kept:
                shared.users.add(self)
        except Exception as error:
            raise InputError(
                f"info.shared({name!r}): the module cannot be copied for each model: "
                f"{one_line(str(error))}: share its state_dict() instead"
            ) from error
        return again

    @property
    def nbytes(self) -> int:
        """The bytes of shared weights."""
        return self.weights.nbytes if "weights" in vars(self) else 0

    def find_written(self) -> list[str]:
        """Return the names of shared weights that have been written to; share them no more."""
        written = self.weights.find_written() if "weights" in vars(self) else []
        if written:
            self.writes += 1
            self._made.clear()
        return written


def _is_module(value: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)
