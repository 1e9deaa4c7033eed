"""Which device merges what: routing by module, with a stand-in for devices that this machine lacks."""

import json
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from helpers.adapters import adapted
from helpers.folders import assert_same_files, on_disk
from helpers.models import fine_tuned, snapshot, tiny_llama
from peft import LoraConfig, OFTConfig, get_peft_model
from transformers import AutoModelForCausalLM

from coram_hf import CoramConfig, CoramError, CoramMerger
from coram_hf.execution.tasks import in_queues
from coram_hf.inputs.opening import open_inputs
from coram_hf.inputs.placement import Placement, placed_as
from coram_hf.merger import Merger
from coram_hf.methods.coram import choose_coram

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
DEVICE_MAP = {
    "model.embed_tokens": "cuda:0",
    "model.layers.0": "cuda:0",
    "model.layers.1": "cuda:1",
    "model.norm": "cpu",
    "model.rotary_emb": "cuda:0",
    "lm_head": "disk",
}


class Doubles:
    """Stands in for devices that are not there: notes what is sent to them, and merges it on the CPU.

    The first parameter of each device waits for that of the other, so the two must be merged side by side.
    """

    def __init__(self):
        self.sent, self.threads = {}, {}
        self._together = threading.Barrier(2, timeout=30)

    def __call__(self, parameter, device):
        if device not in self.threads:
            self.threads[device] = set()
            self._together.wait()
        self.threads[device].add(threading.get_ident())
        self.sent[parameter.name] = device
        parameter.device = torch.device("cpu")
        return parameter


def expected_device(name):
    return SECOND if name.startswith("model.layers.1.") else FIRST


def test_every_module_has_its_device_and_the_bytes_of_one(tmp_path, monkeypatch):
    sources = on_disk(tmp_path)
    config = CoramConfig.from_line("SS(ca+ave,variance).ties", lam=1.5)
    choice = choose_coram(config)  # one pass, so one pool of threads
    inputs = open_inputs(*sources, {})
    Merger(inputs, choice, progress=False).merge_to(tmp_path / "one")
    plain = Merger(inputs, choice, progress=False).merge().model.state_dict()

    routed = Merger(replace(inputs, placement=Placement(DEVICE_MAP, "cuda:0")), choice, progress=False)
    for merge in (lambda: routed.merge_to(tmp_path / "two"), lambda: routed.merge(device_map="cpu")):
        doubles = Doubles()
        monkeypatch.setattr("coram_hf.execution.tasks.to_device", doubles)
        result = merge()
        assert doubles.sent == {name: expected_device(name) for name in inputs.floating}
        assert all(len(threads) == 1 for threads in doubles.threads.values())
        assert set.union(*doubles.threads.values()).isdisjoint({threading.get_ident()})
    assert_same_files(tmp_path / "two", tmp_path / "one")
    assert all(torch.equal(tensor, plain[name]) for name, tensor in result.model.state_dict().items())


def test_hooks_tell_the_device_and_an_explicit_one_wins():
    base = tiny_llama()
    for number, layer in enumerate(base.model.layers):
        hook = AlignDevicesHook(execution_device="cpu")
        add_hook_to_module(layer, hook)
        hook.execution_device = f"cuda:{number}"
    experts = {"e": fine_tuned(tiny_llama(), 0.05, 0)}
    inputs = open_inputs(base, experts, {})
    assert inputs.device_of("model.layers.0.mlp.up_proj.weight") == FIRST
    assert inputs.device_of("model.layers.1.self_attn.q_proj.weight") == SECOND
    cpu = torch.device("cpu")
    assert replace(inputs, device=cpu).devices == [cpu]
    assert open_inputs(tiny_llama(), experts, {}).devices == [cpu]


def test_a_queue_does_not_wait_for_another():
    """Three short items of one queue are done while an item of the other still runs."""
    done, short = [], threading.Event()

    def work(item):
        if item == "long":
            assert short.wait(30)
        done.append(item)
        if len(done) == 3:
            short.set()

    items = ["long", "l2", "l3", "s1", "s2", "s3"]
    found = dict(in_queues(work, items, lambda item: item[0], {"l": 1, "s": 1}))
    assert done[:3] == ["s1", "s2", "s3"]
    assert sorted(found) == sorted(items)


OFFLOADS = {
    "cpu_offload": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk_offload": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
    "dispatch": lambda model, folder: dispatch_model(
        model,
        {
            "base_model.model.model.embed_tokens": "cpu",
            "base_model.model.model.layers.0": "disk",
            "base_model.model.model.layers.1": "cpu",
            "base_model.model.model.norm": "disk",
            "base_model.model.model.rotary_emb": "cpu",
            "base_model.model.lm_head": "disk",
        },
        offload_dir=folder,
    ),
}
ADAPTERS = {
    "lora": LoraConfig(r=2, target_modules=["q_proj", "up_proj"], modules_to_save=["lm_head"]),
    "oft": OFTConfig(oft_block_size=4, r=0, target_modules=["q_proj", "up_proj"]),
}


@pytest.mark.parametrize(("kind", "how"), [*(("lora", how) for how in OFFLOADS), ("oft", "disk_offload")])
def test_adapters_over_an_offloaded_base(tmp_path, kind, how):
    config = CoramConfig.from_line("full.ta")

    def model():
        return adapted(tiny_llama(), ADAPTERS[kind], 1)

    expected = CoramMerger(tiny_llama(), {"x": model()}, config, progress=False).merge().model.state_dict()
    offloaded = OFFLOADS[how](model(), tmp_path / "offload")
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    merger = CoramMerger(offloaded, {"x": offloaded}, config, progress=False)
    for _ in range(2):  # nothing of the model has changed after the first
        found = merger.merge(device_map="cpu").model.state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    placement = placed_as(merger.merge(keep_update=False).model)
    assert (placement is None) == (how == "cpu_offload")


def test_an_adapter_that_peft_lost_is_refused(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", device_map={"": "disk"}, offload_folder=tmp_path / "offload"
    )
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(CoramError, match=r"has no data.*pass the adapter.s folder"):
        CoramMerger(tiny_llama(), {"x": model}, progress=False)


WIDE = OFTConfig(oft_block_size=4, r=0, target_modules=["down_proj"])
"""Its input is wider than PEFT's own merge can handle quickly, so ours is used."""


@pytest.mark.parametrize("config", [ADAPTERS["lora"], WIDE], ids=["lora", "wide oft"])
def test_adapter_folders_over_a_placed_base(tmp_path, monkeypatch, config):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    base = tiny_llama(intermediate_size=1056)
    sources = on_disk(tmp_path, base, experts={"x": adapted(base, config, 1)})
    plain = CoramMerger(*sources, progress=False).merge()
    options = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "offload"}
    placed = CoramMerger(*sources, progress=False, **options).merge()
    base = AutoModelForCausalLM.from_pretrained(sources.base, **options)
    loaded = CoramMerger(base, sources.experts, progress=False).merge()
    expected = snapshot(plain.model)
    for result in (placed, loaded):
        found = result.with_lambda(plain.report.lam).model
        assert all(parameter.is_meta for parameter in found.parameters())
        with torch.no_grad():
            tokens = torch.arange(3, 12).unsqueeze(0)
            assert torch.equal(found(input_ids=tokens).logits, plain.model(input_ids=tokens).logits)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.model.state_dict().items())
    assert not list((tmp_path / "here").iterdir())


MEMORY = """
import json, logging, sys, threading, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from coram_hf import CoramConfig, CoramMerger

logging.disable(logging.WARNING)
torch.set_num_threads(1)
folder = Path(sys.argv[1])
config = LlamaConfig(vocab_size=256, hidden_size=1024, intermediate_size=8192, num_hidden_layers=2,
                     num_attention_heads=8)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
model.to_empty(device="cpu")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.uniform_(-0.02, 0.02)
    model.save_pretrained(folder / "base")
    for parameter in model.parameters():
        parameter[::2] *= 1.01
model.save_pretrained(folder / "e0")
size = sum(parameter.nbytes for parameter in model.parameters())
del model, parameter

def anonymous():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

def merge():
    merger = CoramMerger(folder / "base", [folder / "e0"], CoramConfig(lam=1.2), progress=False,
                         device_map="auto", max_memory={"cpu": size // 4}, offload_folder=folder / "offload")
    return merger.merge()

before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous())

thread = threading.Thread(target=watch)
thread.start()
result = merge()
result.with_lambda(1.0).model.generate(torch.arange(3, 9)[None], max_new_tokens=2)
result.save_pretrained(folder / "merged")
done.set()
thread.join()
print(json.dumps({"size": size, "extra": peak - before}))
"""


def test_memory_stays_below_the_model(tmp_path):
    """Merged with kept updates, reassembled, generated with and saved: all under half of one model."""
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.strip().splitlines()[-1])
    assert found["size"] > 200e6
    assert found["extra"] < found["size"] / 2
