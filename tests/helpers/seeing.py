"""Tiny models that see, with processors that need no torchvision."""

import numpy as np
import transformers as hf
from helpers.architectures import ARCHITECTURES
from helpers.models import CHARACTERS
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

MARKS = {58: "<|vision_start|>", 59: "<|vision_end|>", 60: "<|image_pad|>", 61: "<|video_pad|>"}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


class ImagesOnly(hf.Qwen2_5_VLProcessor):
    """Qwen2.5-VL's processor without its part for videos, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **_):
        self.image_token, self.video_token = MARKS[60], MARKS[61]
        self.image_token_id, self.video_token_id = 60, 61
        hf.ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def seeing_tokenizer(**marks):
    """One token a character, and those of images in their places."""
    tokens = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    tokens += [MARKS.get(i, f"<{i}>") for i in range(len(tokens), 64)]
    special = [mark for mark in (*MARKS.values(), *marks.values()) if mark in tokens]
    backend = Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=special,
    )


def image_processor():
    return hf.Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, min_pixels=28 * 28, max_pixels=56 * 56)


def qwen_vl(seed=0):
    """A tiny Qwen2.5-VL whose answers depend on what it sees, and its processor."""
    processor = ImagesOnly(image_processor(), seeing_tokenizer(), chat_template=TEMPLATE)
    return ARCHITECTURES["Qwen2.5-VL"].build(seed), processor


def llava(seed=0):
    """A tiny LLaVA and its processor, both as transformers has them."""
    processor = hf.LlavaProcessor(
        hf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        seeing_tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=MARKS[60],
    )
    return ARCHITECTURES["LLaVA"].build(seed), processor


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
