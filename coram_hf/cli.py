"""The command line: `coram-hf inspect` and `coram-hf merge`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from coram_hf.merger import CoramMerger

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)

SOURCE = "path, org/repo, org/repo@revision or org/repo:folder/inside@revision"
Base = Annotated[str, typer.Argument(help=f"The model that all experts were fine-tuned from: {SOURCE}.")]
Experts = Annotated[list[str], typer.Argument(help=f"Checkpoints or adapters, each [name=]source: {SOURCE}.")]
Line = Annotated[str, typer.Option(help="The configuration by its line, such as SS(ca+ave,variance).ties.")]
Kappa = Annotated[float | None, typer.Option(help="Restoration strength; by default from the dispersion D.")]
Lambda = Annotated[float | None, typer.Option("--lambda", help="Amplification; by default kappa * scale.")]
Scale = Annotated[str, typer.Option(help="Contraction scale: sqrt_n or c_rms.")]
Weights = Annotated[str | None, typer.Option(help="One number an expert, separated by commas.")]
Balance = Annotated[str | None, typer.Option(help="Rescale uneven experts first: damp or equal.")]
Targets = Annotated[str | None, typer.Option(help="Regular expression on module names, or all-linear.")]
Vocabulary = Annotated[str, typer.Option(help="base, union or error.")]
Dtype = Annotated[str | None, typer.Option(help="Dtype of the result; by default the base's.")]
Trust = Annotated[bool, typer.Option(help="Run and copy custom code of the models.")]


@app.command()
def inspect(
    base: Base,
    experts: Experts,
    line: Line = "full",
    kappa: Kappa = None,
    lam: Lambda = None,
    scale: Scale = "sqrt_n",
    weights: Weights = None,
    balance: Balance = None,
    target_modules: Targets = None,
    vocabulary: Vocabulary = "base",
    trust_remote_code: Trust = False,
) -> None:
    """Say what a merge would do: the parts of the model, D, kappa, lambda, warnings."""
    given = {"kappa": kappa, "lam": lam, "scale": scale, "balance": balance, "target_modules": target_modules}
    options = {"vocabulary": vocabulary, "trust_remote_code": trust_remote_code}
    print(_merger(base, experts, line, given, weights, options).inspect())


@app.command()
def merge(
    base: Base,
    experts: Experts,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the merged model.")],
    line: Line = "full",
    kappa: Kappa = None,
    lam: Lambda = None,
    scale: Scale = "sqrt_n",
    weights: Weights = None,
    balance: Balance = None,
    target_modules: Targets = None,
    vocabulary: Vocabulary = "base",
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    overwrite: Annotated[bool, typer.Option(help="Replace an existing output folder.")] = False,
) -> None:
    """Merge checkpoints and adapters into one model; the folder appears when it is whole."""
    if output.exists() and not overwrite:
        raise ValueError(f"{output} exists; choose another folder, or pass --overwrite")
    given = {"kappa": kappa, "lam": lam, "scale": scale, "balance": balance, "target_modules": target_modules}
    options = {"vocabulary": vocabulary, "dtype": dtype, "trust_remote_code": trust_remote_code}
    result = _merger(base, experts, line, given, weights, options).merge(keep_update=False)

    partial = output.parent / f".{output.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        result.save_pretrained(partial)
        if output.exists():
            shutil.rmtree(output)
        os.replace(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    report = result.report
    print(f"{report.line}: D {report.dispersion:.3g}, kappa {report.kappa}, lambda {report.lam:.4g}")
    print(f"merged {report.n_experts} experts into {output}")


def _merger(
    base: str,
    experts: list[str],
    line: str,
    given: dict[str, Any],
    weights: str | None,
    options: dict[str, Any],
) -> CoramMerger:
    from coram_hf.config import CoramConfig
    from coram_hf.merger import CoramMerger

    if weights is not None:
        given["weights"] = [_number(text) for text in weights.split(",")]
    config = CoramConfig.from_line(line, **given)
    return CoramMerger(base, experts, config, **options, progress=sys.stderr.isatty())


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--weights: {text!r} is not a number") from None


def main() -> None:
    """Run the command line: exit 0 on success, 2 on bad input with one clear line on stderr."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"coram-hf: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
