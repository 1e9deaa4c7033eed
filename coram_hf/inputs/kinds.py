"""What every parameter is: attention, MLP, norm, and so on, by the class and position of its module.

Names of models, modules and parameters play no part, once `language_part` has found the language model. A
class says what a module is (an embedding, a convolution, attention), its position what it is for (a linear
map of a block, of a tower, of the head), and where a class is a model's own, its shape does: a norm has only
vectors, a router one row per expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coram_hf.inputs.targets import CONVOLUTIONS, expert_counts, is_block_list, language_part
from coram_hf.inputs.weights import backbone_prefix

KINDS = (
    "attention",
    "mlp",
    "experts",
    "mixer",
    "router",
    "embedding",
    "head",
    "norm",
    "bias",
    "convolution",
    "projector",
    "tower",
    "other",
)
"""All kinds, in the order of tables. A mixer is what some blocks have in place of attention (Mamba)."""

LINEAR = (nn.Linear, Conv1D, nn.MultiheadAttention)
SMALL = 1e-2
"""Above the epsilon with which a norm avoids division by zero."""
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
"""Attributes of a module that splits its input into attention heads."""


def find_kinds(model: PreTrainedModel) -> dict[str, str]:
    """The kind of every parameter and persistent buffer, by all of its names."""
    return dict(_Finder(model).kinds())


def head_names(model: PreTrainedModel) -> set[str]:
    """The parameters and buffers outside the backbone, and those of poolers inside it."""
    kinds, prefix = find_kinds(model), backbone_prefix(model)
    owners = {name.rpartition(".")[0] for name, kind in kinds.items() if kind == "head"}
    return {n for n in kinds if not n.startswith(prefix) or n.rpartition(".")[0] in owners}


class _Finder:
    """A model's modules by name, with the parts that they belong to."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._counts = expert_counts(model.config.get_text_config())
        self._names = list(model.state_dict())
        lists = [name for name, module in self._modules.items() if is_block_list(module)]
        self._blocks = {f"{name}.{key}" for name in lists for key, _ in self._modules[name].named_children()}
        self._head = self._prefixes_of(model.get_output_embeddings())
        self._backbone = next(iter(self._prefixes_of(model.base_model)), "")
        self._parts = self._outside_language(model)
        self._mixtures = self._experts_and_routers()

    def kinds(self) -> Iterator[tuple[str, str]]:
        """Every name with its kind; a tensor with several owners is a bias if it is one for any of them."""
        tensors: dict[str, Tensor] = {}
        biases: set[int] = set()
        for prefix, module in self._modules.items():
            for key, tensor in _own_tensors(module).items():
                tensors[f"{prefix}.{key}" if prefix else key] = tensor
                biases |= {id(tensor)} if self._is_bias(module, tensor) else set()
        for name in self._names:
            known = name in tensors
            yield name, self._kind(name.rpartition(".")[0], id(tensors[name]) in biases) if known else "other"

    def _kind(self, owner: str, bias: bool) -> str:
        module, path = self._modules[owner], _ancestors(owner)
        for prefix in reversed(path):
            if self._parts.get(prefix, "head") != "head":
                return self._parts[prefix]
        if _is_norm(module):
            return "norm"
        if bias:
            return "bias"
        if isinstance(module, nn.Embedding):
            return "embedding"
        if isinstance(module, CONVOLUTIONS):
            return "convolution"
        for prefix in path:
            if prefix in self._mixtures:
                return self._mixtures[prefix]
        inside = next((i for i, prefix in enumerate(path) if prefix in self._blocks), None)
        if inside is not None:
            return self._in_block(path[inside:], isinstance(module, LINEAR))
        return self._around_blocks(path, module)

    def _in_block(self, path: list[str], linear: bool) -> str:
        """The kind of the innermost part of a block that shows one; other linear maps are its MLP."""
        for prefix in reversed(path[1:]):
            if (kind := _part_of_block(self._modules[prefix])) is not None:
                return kind
        return "mlp" if linear else "other"

    def _around_blocks(self, path: list[str], module: nn.Module) -> str:
        """The head is outside the backbone, or pools; other linear maps lead from one width to another."""
        if any(prefix in self._head or self._parts.get(prefix) == "head" for prefix in path):
            return "head"
        if self._backbone and self._backbone not in path:
            return "head"
        if any(_named(self._modules[prefix], "pool") for prefix in path):
            return "head"
        if isinstance(module, LINEAR):
            return "projector"
        parts = list(module.modules())
        embeds = any(isinstance(part, (nn.Embedding, *CONVOLUTIONS)) for part in parts)
        return "embedding" if embeds and not any(map(is_block_list, parts)) else "other"

    def _is_bias(self, module: nn.Module, tensor: Tensor) -> bool:
        """A vector beside the matrix that it is added to, or one vector per expert beside their stack."""
        if isinstance(module, (*LINEAR, *CONVOLUTIONS)):
            return tensor.ndim == 1
        ranks = {own.ndim for own in _own_tensors(module).values()}
        if self._stacks(module):
            return tensor.ndim == 2 and 3 in ranks
        return tensor.ndim == 1 and ranks == {1, 2} and not list(module.children())

    def _stacks(self, module: nn.Module) -> bool:
        """Whether a module has the matrices of several experts in one parameter."""
        counts = self._counts | expert_counts(module)
        return not isinstance(module, CONVOLUTIONS) and any(
            tensor.ndim == 3 and tensor.shape[0] in counts and min(tensor.shape[1:]) > 1
            for tensor in _own_tensors(module).values()
        )

    def _experts_and_routers(self) -> dict[str, str]:
        """Stacks or lists of experts, and the small maps beside them that choose or weigh experts."""
        found: dict[str, str] = {}
        for name, module in self._modules.items():
            dot, counts = f"{name}." if name else "", self._counts | expert_counts(module)
            children = {f"{dot}{key}": child for key, child in module.named_children()}
            stacks = {key for key, child in children.items() if self._stacks(child)}
            lists = {key for key, child in children.items() if _is_list_of_experts(child, counts)}
            gates = {
                key
                for key, child in children.items()
                if key not in stacks and (_is_gate(child, counts) or _named(child, "router"))
            }
            found |= dict.fromkeys(stacks | (lists if gates else set()), "experts")
            found |= dict.fromkeys(gates if stacks or lists else set(), "router")
            found |= {key: "router" for key, child in children.items() if _named(child, "router")}
        return found

    def _prefixes_of(self, module: nn.Module | None) -> set[str]:
        return {name for name, other in self._modules.items() if name and other is module}

    def _outside_language(self, model: PreTrainedModel) -> dict[str, str]:
        """The largest modules outside the language model: towers, projectors and the head."""
        within = language_part(model, self._modules)
        language = {prefix for name in self._names if within(name) for prefix in _ancestors(name)}
        found: dict[str, str] = {}
        for name in self._names:
            for prefix in _ancestors(name.rpartition(".")[0]):
                if prefix not in language:
                    found[prefix] = self._part(prefix, language)
                    break
        if found and "projector" not in found.values():
            width = getattr(model.config.get_text_config(), "hidden_size", None)
            for tower in [name for name, kind in found.items() if kind == "tower"]:
                found |= dict.fromkeys(self._projectors(tower, width), "projector")
        return found

    def _part(self, prefix: str, language: set[str]) -> str:
        """A tower reads another modality by blocks; what is outside the backbone of both is the head."""
        parts = list(self._modules[prefix].modules())
        convolves = any(isinstance(part, CONVOLUTIONS) for part in parts)
        if any(head == prefix or head.startswith(f"{prefix}.") for head in self._head):
            return "head"
        if isinstance(parts[0], PreTrainedModel) or (convolves and any(map(is_block_list, parts))):
            return "tower"
        beside = self._backbone in language and not f"{prefix}.".startswith(f"{self._backbone}.")
        return "head" if beside else "projector"

    def _projectors(self, tower: str, width: int | None) -> Iterator[str]:
        """Parts of a tower without attention whose last linear map has the width of the language model."""
        for key, child in self._modules[tower].named_children():
            items = list(child) if isinstance(child, nn.ModuleList) else [child]
            maps = [[m for m in item.modules() if isinstance(m, nn.Linear)] for item in items]
            attends = any(_part_of_block(m) == "attention" for item in items for m in item.modules())
            if not attends and all(maps) and all(of[-1].out_features == width for of in maps):
                yield f"{tower}.{key}"


def _own_tensors(module: nn.Module) -> Mapping[str, Tensor]:
    """The parameters and buffers that a module holds itself."""
    own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    return {**own, **dict(module.named_buffers(recurse=False, remove_duplicate=False))}


def _ancestors(name: str) -> list[str]:
    """The names of the modules on the way to a module or parameter, and its own."""
    parts = name.split(".") if name else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _named(module: nn.Module, *words: str) -> bool:
    """Whether the name of a module's class has one of these words."""
    return any(word in type(module).__name__.lower() for word in words)


def _is_norm(module: nn.Module) -> bool:
    """Whether a module has only vectors, and an epsilon or the word in its class."""
    tensors = _own_tensors(module).values()
    if not tensors or list(module.children()) or any(tensor.ndim > 1 for tensor in tensors):
        return False
    values = vars(module).values()
    return _named(module, "norm") or any(isinstance(v, float) and 0 < v < SMALL for v in values)


def _part_of_block(module: nn.Module) -> str | None:
    """What a part of a block is: by the word in its class, by a convolution, or by its heads."""
    if isinstance(module, nn.MultiheadAttention) or _named(module, "attention", "attn"):
        return "attention"
    if _named(module, "mlp", "feedforward", "ffn"):
        return "mlp"
    if _named(module, "mixer") or any(isinstance(child, CONVOLUTIONS) for child in module.children()):
        return "mixer"
    return "attention" if any(isinstance(getattr(module, key, None), int) for key in HEADS) else None


def _is_list_of_experts(module: nn.Module, counts: set[int]) -> bool:
    """Whether a module is a list of networks, one per expert."""
    return (
        isinstance(module, nn.ModuleList | nn.ModuleDict)
        and len(module) in counts
        and all(sum(p.ndim == 2 for p in child.parameters()) > 1 for child in module.children())
    )


def _is_gate(module: nn.Module, counts: set[int]) -> bool:
    """Whether all matrices of a module have one row per expert, or a single one."""
    matrices = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    return bool(matrices) and all(matrix.shape[0] in counts | {1} for matrix in matrices)
