"""Models whose linear layers multiply by oneDNN, where that is faster than torch's own product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.nn import functional
from torch.overrides import TorchFunctionMode

from coram_hf.geometry.onednn import has_onednn, linear


def fast_layers() -> AbstractContextManager[object]:
    """Within it, this thread's models compute their linear layers by `geometry.onednn.linear`."""
    return _FastLayers() if has_onednn() else nullcontext()


class _FastLayers(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return (linear if func is functional.linear else func)(*args, **(kwargs or {}))
