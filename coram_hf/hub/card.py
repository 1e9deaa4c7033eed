"""The model card, made from the report of a merge: what was merged, how, and with what outcome."""

from __future__ import annotations

from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from coram_hf.hub.again import command_line, entry_of, python_code, sources_of
from coram_hf.hub.calibration import calibration_text
from coram_hf.hub.metadata import card_metadata, licenses_of
from coram_hf.hub.model_index import with_results
from coram_hf.hub.parents import license_list, parents_table, source_text, transplants_table
from coram_hf.hub.surroundings import surroundings_text
from coram_hf.hub.text import fenced, inline, number
from coram_hf.hub.usage import usage_code
from coram_hf.outputs.files import write_whole
from coram_hf.report import MergeReport
from coram_hf.report.adapter import worst_matrices
from coram_hf.report.eval_results import EVAL_NAME, EvalResults
from coram_hf.report.figures import FIGURE
from coram_hf.report.kinds import kind_table
from coram_hf.report.merge_report import DECORRELATION, REPORT_NAME
from coram_hf.report.tables import markdown as table

CARD = "README.md"
PUBLISHED = (CARD, REPORT_NAME, EVAL_NAME)
"""The files about a merge, which may have been edited."""
BEGIN, END = "<!-- coram: begin -->", "<!-- coram: end -->"
TEMPLATES = Path(__file__).parent
CHOICE = {
    "rule": "lambda = kappa * scale, with kappa by the rule from D; nothing was evaluated",
    "kappa": "lambda = kappa * scale, with a given kappa",
    "amplitude": "lambda = a * c_RMS, with a given amplitude a",
    "neutral": "lambda = kappa * scale, with the scale at which the merge changes neutral text as much as a "
    "typical expert does, within a limit; nothing was evaluated",
    "given": "lambda was given, by hand or after a sweep",
    "calibrated": "lambda, and factors if any, were found from a few unlabelled prompts",
}
COUNTS = {
    "targets": "target tensors, merged by the method",
    "residual": "other tensors that were merged",
    "slices": "slices",
    "det_flips": "rotations that were reflections, and had a column negated",
    "near_pi": "rotations by an angle near pi",
    "float32": "slices merged in float32, all others in float64",
    "float64_fallbacks": "slices that float32 was not certain to merge to 1e-5, merged in float64",
    "svd_fallbacks": "slices too badly conditioned for the fast kernel, merged by SVD",
    "frameless": "slices without a frame, merged by the mean",
}
WORST = 10
"""The number of matrices of an adapter whose error the card shows."""
CITATION = """@misc{sui2026coram,
  title = {{CORAM}: Coherent Orthogonal Rotation for Model Merging},
  author = {Sui, Xinyi and Liu, Ziran and Ling, Nam and Wang, Wei and Jiang, Wei},
  year = {2026},
  note = {Preprint}
}"""


def render_card(report: MergeReport, card_data: ModelCardData | None = None) -> ModelCard:
    """The whole card; fields of `card_data` replace those that follow from the report."""
    content = (
        _environment()
        .get_template("card_template.md")
        .render(
            card_data=card_metadata(report, card_data).to_yaml().strip(),
            title=_title(report),
            section=_section(report),
        )
    )
    return ModelCard(content)


def write_card(report: MergeReport, folder: Path, card_data: ModelCardData | None = None) -> None:
    """Write the whole card of a merge into its folder."""
    _write(render_card(report, card_data).content, report, folder)


def renew_card(text: str, report: MergeReport, folder: Path) -> None:
    """Write a card that may have been edited, with our section and the results updated."""
    _write(renewed_card(text, report), report, folder)


def _write(text: str, report: MergeReport, folder: Path) -> None:
    whole = with_results(text, EvalResults.load(folder, report.files))
    write_whole(folder / CARD, whole)


def edited_card(path: Path, folder: Path) -> str:
    """The text of a card of ours that was edited after it was made from the report beside it, else ""."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if BEGIN not in text:
        return ""
    try:
        made = render_card(MergeReport.load(folder)).content
        return "" if with_results(text, None) == made else text
    except (ValueError, OSError, yaml.YAMLError):
        return text


def renewed_card(text: str, report: MergeReport) -> str:
    """A card with our marked section updated and everything else kept.

    If it has no marked section, ours is added at the end.
    """
    section = _section(report)
    before, mark, rest = text.partition(BEGIN)
    _, closing, after = rest.rpartition(END)
    if mark and closing:
        return f"{before}{section}{after}"
    return f"{text.rstrip()}\n\n{section}\n"


def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        keep_trailing_newline=True,
    )


def _title(report: MergeReport) -> str:
    names = [inline(name) for name in report.relative_updates]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"A merge of {shown}" + (f", as {_adapter_type(report)} adapter" if report.adapter else "")


def _section(report: MergeReport) -> str:
    body = (
        _environment()
        .get_template("section_template.md")
        .render(
            intro=_intro(report),
            amplitude=table(["", ""], _amplitude(report)),
            figure=FIGURE.as_posix(),
            calibration=calibration_text(report),
            parents=parents_table(report),
            licenses=license_list(report),
            transplants=transplants_table(report),
            adapter=_adapter(report),
            surroundings=surroundings_text(report),
            counts=table(["", ""], _counts(report)),
            kinds=_kinds(report),
            warnings="\n".join(f"- {inline(warning)}" for warning in _warnings(report)),
            options=table(["option", "value"], [(inline(k), inline(v)) for k, v in report.config.items()]),
            usage=fenced(usage_code(report, sources_of(report)[0]), "python"),
            python=fenced(python_code(report), "python"),
            shell=fenced(command_line(report), "bash"),
            versions=", ".join(f"{inline(name)} {inline(v)}" for name, v in report.versions.items()),
            citation=fenced(CITATION, "bibtex"),
        )
    )
    return f"{BEGIN}\n{body.strip()}\n{END}"


def _intro(report: MergeReport) -> str:
    how, kind = inline(entry_of(report).title), inline(report.model_class or "Model")
    names = ", ".join(inline(name) for name in report.relative_updates)
    several = report.n_experts > 1
    experts, whose = (f"{report.n_experts} experts", "their") if several else ("one expert", "its")
    what = f"{_adapter_type(report).capitalize()} adapter" if report.adapter else kind
    data = "calibrated on unlabelled prompts, " if report.calibration else ""
    unseen = "" if report.lam_source == "given" else " and without evaluation data"
    return (
        f"{what} with {experts} ({names}) merged into {whose} base "
        f"({source_text(report.sources.get('', {}))}) by {how} with coram_hf, {data}without training{unseen}."
    )


def _amplitude(report: MergeReport) -> list[tuple[str, str]]:
    rows = [("line", inline(report.line)), ("dispersion D", number(report.dispersion))]
    if report.unbalanced_dispersion != report.dispersion:
        rows.append(("D before balancing", number(report.unbalanced_dispersion)))
    if report.lam is None:
        rows.append(("kappa, lambda", f"none: {inline(report.method)} has no amplification"))
    else:
        used = "kappa, not used" if report.lam_source in ("given", "calibrated") else "kappa"
        scale, _ = report.scale
        rows += [(used, number(report.kappa))] if report.kappa is not None else []
        rows.append(("lambda", number(report.lam)))
        rows.append((f"effective kappa, lambda / {scale}", number(report.effective_kappa)))
        rows.append(("chosen", _choice(report)))
        if report.neutral:
            rows.append(("neutral scale", number(report.neutral["scale"])))
            shifts = [number(report.neutral[key]) for key in ("merged", "target")]
            rows.append(("KL from the base on neutral text: merge, aim of the scale", ", ".join(shifts)))
    rows += [("c_RMS", number(report.c_rms)), ("sqrt(N)", number(report.sqrt_n))]
    rows.append(("amplitude a, the size of the merged update over the experts'", number(report.amplitude)))
    return [*rows, *((DECORRELATION[key], number(value)) for key, value in report.decorrelation.items())]


def _choice(report: MergeReport) -> str:
    """How lambda came about, in words."""
    words = CHOICE.get(report.lam_source or "", inline(report.lam_source))
    step = report.config.get("lambda_step") if report.lam_source in ("rule", "kappa", "neutral") else None
    return words.replace("scale,", f"scale, rounded to a multiple of {step:g},", 1) if step else words


def _adapter_type(report: MergeReport) -> str:
    kind = str(report.adapter["type"])
    return {"LORA": "a LoRA", "OFT": "an OFT"}.get(kind, f"a {inline(kind)}")


def _adapter(report: MergeReport) -> str:
    """What the adapter stores: its ranks, its error, and the matrices that it stores least exactly."""
    if not report.adapter:
        return ""
    if not report.adapter_errors:
        return f"This is {_adapter_type(report)} adapter of the base: the merge itself, nothing is truncated."
    ranks, wanted = report.adapter_ranks.values(), report.adapter
    energy = f"{wanted['energy']} of the squared norm of each matrix"
    rows = [
        ("matrices", str(len(ranks))),
        ("kept", f"rank {wanted['rank']}" if wanted["rank"] else energy),
        ("ranks", f"{min(ranks)} to {max(ranks)}"),
        ("relative error over all matrices", number(wanted["error"], 3)),
    ]
    worst = [(inline(n), str(rank), number(e, 3)) for n, rank, e in worst_matrices(report, WORST)]
    return "\n\n".join(
        [
            f"This is {_adapter_type(report)} adapter of the base, by a truncated SVD of the merged update.",
            table(["", ""], rows),
            "The least exact matrices; [coram_report.json](coram_report.json) has all of them:",
            table(["matrix", "rank", "relative error"], worst),
        ]
    )


def _counts(report: MergeReport) -> list[tuple[str, str]]:
    rows = [(COUNTS.get(key, inline(key)), str(count)) for key, count in report.counts.items()]
    rows += [
        (f"largest entry of R^T R - I, {inline(name)}", number(error))
        for name, error in report.orthogonality_errors.items()
    ]
    rows.append(("worst condition number of a slice", number(report.worst_condition)))
    if report.float32_difference is not None:
        rows.append(
            (
                "update in float32 against float64, relative difference of sampled slices",
                number(report.float32_difference),
            )
        )
    if not report.adapter:
        rows.append(("rounding to the stored dtype, relative to the update", number(report.rounding_loss)))
    return [*rows, ("share of the update norm that was left at the base", f"{report.left_at_base:.1%}")]


def _kinds(report: MergeReport) -> str:
    header, rows = kind_table(report.kinds, report.retention)[1:]
    return table(header, [(inline(kind), *numbers) for kind, *numbers in rows])


def _warnings(report: MergeReport) -> list[str]:
    licenses = sorted(licenses_of(report))
    unknown = [name or "base" for name, found in report.sources.items() if not found.get("license")]
    some = f"the licenses of {', '.join(unknown)} are not known" if licenses and unknown else ""
    mixed = f"the parents have different licenses ({', '.join(licenses)}); check that you may share the merge"
    return [*report.warnings, *([mixed] if len(licenses) > 1 else []), *([some] if some else [])]
