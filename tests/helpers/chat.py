"""Bases without and experts with a chat template, saved in folders."""

from helpers.models import fine_tuned, tiny_llama, tiny_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
PLAIN = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"


def saved(folder, name, model, tokenizer, template=None, generation=None, **ids):
    """Save a model with its tokenizer, template, generation settings and special tokens."""
    for key, value in ids.items():
        setattr(model.config, key, value)
        setattr(model.generation_config, key, value)
    for key, value in (generation or {}).items():
        setattr(model.generation_config, key, value)
    tokenizer.chat_template = template
    model.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / name)
    return folder / name


def instructed(folder, experts, base_template=None, **base_options):
    """A base with eos 1 and pad 0, and experts of it, each with the options of `saved`."""
    base = tiny_llama()
    path = saved(
        folder, "base", base, tiny_tokenizer(), base_template, eos_token_id=1, pad_token_id=0, **base_options
    )
    paths = {}
    for seed, (name, options) in enumerate(experts.items()):
        given = {"eos_token_id": 1, "pad_token_id": 0, **options}
        paths[name] = saved(folder, name, fine_tuned(base, 0.05, seed), tiny_tokenizer(), **given)
    return path, paths
