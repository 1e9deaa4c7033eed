"""Memory, measured in a process of its own: adapters are never full copies."""

import json
import subprocess
import sys

SCRIPT = """
import copy, ctypes, gc, json, logging, threading, torch
from pathlib import Path
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
from coram_hf import CoramConfig, CoramMerger

logging.disable(logging.WARNING)
torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(vocab_size=1000, hidden_size=768, intermediate_size=2048, num_hidden_layers=4,
                     num_attention_heads=12, tie_word_embeddings=True)
base = LlamaForCausalLM(config)
adapter = LoraConfig(r=4, target_modules=r".*_proj")
model = get_peft_model(base, adapter, adapter_name="a0")
for i in range(1, 8):
    model.add_adapter(f"a{i}", adapter)
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(std=0.01)

def anonymous():
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.wait(0.005):
        peak = max(peak, anonymous())

thread = threading.Thread(target=watch)
thread.start()
result = CoramMerger(model, [model], CoramConfig(lam=2.0), progress=False).merge(keep_update=False)
done.set()
thread.join()
sizes = {n: p.numel() * p.element_size() for n, p in result.model.named_parameters()}
targets = [size for name, size in sizes.items() if "_proj" in name]
print(json.dumps({"extra": peak - before, "result": sum(sizes.values()), "whole": sum(targets),
                  "largest_target": max(targets), "experts": result.report.n_experts}))
"""


MATRICES = 8 + 3
"""Of the largest target: one of every adapter, and three while one is made."""

CHUNKS = 130e6
"""What the chunks of the geometry take, and the libraries that are loaded on the way."""


def test_eight_adapters_take_one_result_and_one_matrix_of_each():
    """Not even one adapter's expert is held whole: it would be as large as the result."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    found = json.loads(run.stdout.strip().splitlines()[-1])
    assert found["experts"] == 8
    extra = found["extra"] - found["result"]
    assert found["whole"] > 110e6
    assert extra <= MATRICES * found["largest_target"] + CHUNKS
