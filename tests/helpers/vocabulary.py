"""Tokenizers of whole words."""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(40)]


def word_tokenizer(words, added=()):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token=words[0])),
        unk_token=words[0],
    )
    tokenizer.add_tokens(list(added))
    return tokenizer
