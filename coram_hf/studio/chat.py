"""Chat: the same question to base, expert and merge, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coram_hf.calibration.teachers import find_text, greedy, placed
from coram_hf.config import CalibrationConfig
from coram_hf.errors import CoramError
from coram_hf.inputs.inputs import Inputs
from coram_hf.inputs.text import context_length, text_tokens
from coram_hf.outputs.memory import expert_model, new_model
from coram_hf.result import MergeResult
from coram_hf.studio.session import Session

LONGEST = {True: 160, False: 48}
"""Tokens of an answer, through the chat template or as one line of text."""


@dataclass
class Turn:
    """A question, whom it was asked, and the answers."""

    question: str
    expert: str
    lam: float
    base_says: str
    expert_says: str
    merge_says: str
    right: str = ""


@dataclass
class Chat:
    """Questions and answers of one session; base and the last expert stay in memory between them."""

    session: Session
    turns: list[Turn] = field(default_factory=list)
    _inputs: Inputs | None = None
    _models: dict[str, PreTrainedModel] = field(default_factory=dict)

    def ask(self, question: str, expert: str, template: bool, right: str = "") -> Turn:
        """Ask all three; with `template` as the next message of a chat, else as text to be continued."""
        if not question.strip():
            raise CoramError("there is no question: type one, or choose an example")
        with self.session.lock:
            result = self.session.merged()
            self.session.idle()
            said = {
                who: self._answer(model, question, who, template)
                for who, model in (
                    ("base", self._model("")),
                    ("expert", self._model(expert)),
                    ("merge", result.model),
                )
            }
            lam = _lam(result)
            turn = Turn(question, expert, lam, said["base"], said["expert"], said["merge"], right)
            self.turns.append(turn)
            return turn

    def again(self, template: bool) -> None:
        """Let the merge answer the last question again, at the lambda that it has now."""
        if self.turns:
            result, last = self.session.merged(), self.turns.pop()
            last.merge_says = self._answer(result.model, last.question, "merge", template)
            last.lam = _lam(result)
            self.turns.append(last)

    def clear(self) -> None:
        """Forget the conversation, and the models if others are open now."""
        self.turns.clear()

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self.session.merger is not None and bool(self._tokenizer().chat_template)

    def _model(self, name: str) -> PreTrainedModel:
        """The base, or one expert; only one expert is kept."""
        inputs = self._open()
        if name not in self._models:
            if name:
                self._models = {who: model for who, model in self._models.items() if not who}
            made = expert_model(inputs, name) if name else new_model(inputs)
            self._models[name] = placed(made, inputs)
        return self._models[name]

    def _open(self) -> Inputs:
        merger = self.session.merger
        if merger is None:
            raise CoramError("nothing is open yet: choose a base and experts, then inspect them")
        if self._inputs is not merger.inputs:
            self._inputs, self._models = merger.inputs, {}
        return merger.inputs

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return find_text(self._open(), "chat", "see the report instead")

    def _answer(self, model: PreTrainedModel, question: str, who: str, template: bool) -> str:
        tokenizer = self._tokenizer()
        tokens = self._chat_tokens(tokenizer, question, who) if template else text_tokens(tokenizer, question)
        longest, most = LONGEST[template], context_length(model)
        if most is not None and len(tokens) + longest > most:
            raise CoramError(f"the conversation has {len(tokens)} tokens, too many for this model; clear it")
        config = CalibrationConfig(answer_tokens=longest, answer_line=not template)
        (said,) = greedy(model.eval(), tokenizer, [tokens], config)
        return str(tokenizer.decode(said, skip_special_tokens=True)).strip()

    def _chat_tokens(self, tokenizer: PreTrainedTokenizerBase, question: str, who: str) -> list[int]:
        if not tokenizer.chat_template:
            raise CoramError("the tokenizer has no chat template; switch the chat template off")
        messages = []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": getattr(turn, f"{who}_says")})
        messages.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(cast(Any, messages), add_generation_prompt=True, tokenize=False)
        return list(tokenizer(str(text), add_special_tokens=False).input_ids)


def _lam(result: MergeResult) -> float:
    """Lambda of a merge, which may be 0; a method without amplification has 1."""
    return 1.0 if result.report.lam is None else result.report.lam
