"""Chat templates: read from a tokenizer or its folder, and written into a merged folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from coram_hf.errors import CoramError
from coram_hf.inputs.files import read_json

Template = str | dict[str, str]
"""One template, or several by name, of which `default` is used."""

FILE, FOLDER, LEGACY_FILE = "chat_template.jinja", "additional_chat_templates", "chat_template.json"
CONFIGS = ("tokenizer_config.json", "processor_config.json", LEGACY_FILE)
"""JSON files that may hold a template as well."""


def find_template(tokenizer: PreTrainedTokenizerBase | None, folder: Path | None) -> Template | None:
    """The template of a tokenizer, or else of a folder."""
    own: Any = None if tokenizer is None else tokenizer.chat_template
    if own:
        return _plain(own)
    return None if folder is None else _in_folder(folder)


def read_template(path: Path) -> Template:
    """The template in a Jinja file, in a JSON file with the key chat_template, or in a folder."""
    if path.is_dir():
        found = _in_folder(path)
    elif path.suffix == ".json":
        found = _in_json(path)
    else:
        try:
            found = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CoramError(f"chat_template: {path} cannot be read ({error})") from error
    if not found:
        raise CoramError(f"chat_template: {path} holds no chat template")
    return found


def write_template(folder: Path, template: Template | None) -> None:
    """Make a template the only one in a folder, or remove all templates."""
    (folder / FILE).unlink(missing_ok=True)
    (folder / LEGACY_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    for name in CONFIGS:
        path = folder / name
        content = read_json(path) if path.is_file() else {}
        if content.pop("chat_template", None) is not None:
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    several = {"default": template} if isinstance(template, str) else dict(template or {})
    for name, text in several.items():
        place = FILE if name == "default" else f"{FOLDER}/{Path(name).name}.jinja"
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(text, encoding="utf-8")


def tokens_in(template: Template | None, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """The added tokens of a tokenizer that appear in a template."""
    if template is None or tokenizer is None:
        return []
    text = template if isinstance(template, str) else "\n".join(template.values())
    return [token for added in tokenizer.added_tokens_decoder.values() if (token := str(added)) in text]


def _in_folder(folder: Path) -> Template | None:
    named = {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    if (folder / FILE).is_file():
        named["default"] = folder / FILE
    if named:
        return _plain({name: path.read_text(encoding="utf-8") for name, path in named.items()})
    found = (_in_json(folder / name) for name in CONFIGS if (folder / name).is_file())
    return next((template for template in found if template), None)


def _in_json(path: Path) -> Template | None:
    content = read_json(path)
    found = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(found, list):
        found = {str(entry["name"]): str(entry["template"]) for entry in found}
    return _plain(found) if found else None


def _plain(template: Template) -> Template:
    """A single default template as text."""
    if isinstance(template, dict) and set(template) == {"default"}:
        return template["default"]
    return template
