"""`coram-hf assemble`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coram_hf.cli.merge import Overwrite, Shards, conclude_merge
from coram_hf.errors import CoramError

Merged = Annotated[Path, typer.Argument(help="A merged folder, whose recipe names base and experts.")]
Update = Annotated[Path, typer.Argument(help="The update that `merge --keep-update` kept.")]
Lambda = Annotated[float, typer.Option("--lambda", help="Amplification coefficient.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder for the merged model.")]


def assemble(
    merged: Merged,
    update: Update,
    lam: Lambda,
    output: Output,
    max_shard_size: Shards = "50GB",
    overwrite: Overwrite = False,
) -> None:
    """Make a merge at another lambda from its kept update, without the geometry."""
    from coram_hf.assembly import assemble as write
    from coram_hf.cli.recipe import read_recipe
    from coram_hf.cli.voice import VOLUME
    from coram_hf.hub.recipe import RECIPE_NAME

    if not (merged / RECIPE_NAME).is_file():
        raise CoramError(f"{merged} has no {RECIPE_NAME}; name the folder that `merge --keep-update` wrote")
    recipe = read_recipe(merged / RECIPE_NAME)
    recipe.check_output(output, overwrite=overwrite)
    merger = recipe.merger(progress=not VOLUME.get().quiet)
    try:
        report = write(merger, update, lam, output, overwrite=overwrite, max_shard_size=max_shard_size)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    conclude_merge({output: report})
