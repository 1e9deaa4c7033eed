"""Models saved in folders, and folders compared with each other."""

import torch
from safetensors.torch import load_file

WEIGHTS = ("*.safetensors", "*.index.json", "config.json", "generation_config.json")


def saved(folder, models, **options):
    for name, model in models.items():
        model.save_pretrained(folder / name, **options)
    return [folder / name for name in models]


def contents(folder):
    return {path.name: path.read_bytes() for pattern in WEIGHTS for path in folder.glob(pattern)}


def assert_same_files(found, expected):
    assert contents(found).keys() == contents(expected).keys()
    for name, data in contents(expected).items():
        assert contents(found)[name] == data, name


def tensors_of(folder):
    return {k: t for path in folder.glob("*.safetensors") for k, t in load_file(path).items()}


def assert_same_tensors(found, expected):
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
