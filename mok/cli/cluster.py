"""`mok allocation` and `mok slurm`: where we run, and job scripts that take us elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mok.cli.output import AsJson, emit

slurm_app = typer.Typer(rich_markup_mode=None)

Time = Annotated[str, typer.Option(help="Time limit: minutes, H:MM:SS or D-H:MM:SS.")]
Nodes = Annotated[int, typer.Option(help="Nodes.")]
Gpus = Annotated[int, typer.Option(help="GPUs per node.")]
Partition = Annotated[str | None, typer.Option(help="Slurm partition.")]
Account = Annotated[str | None, typer.Option(help="Slurm account.")]
Extra = Annotated[list[str] | None, typer.Option("--sbatch", help="One more option for sbatch, as in --sbatch=--qos=high.")]
Print = Annotated[bool, typer.Option("--print", help="Print the script instead of submitting it.")]


@slurm_app.callback(invoke_without_command=True)
def slurm_root(context: typer.Context) -> None:
    """Submit job scripts to Slurm, or print them."""
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit


def allocation(as_json: AsJson = False) -> None:
    """Describe where we run: this machine, a rank of torchrun, a Slurm allocation; its GPUs, links, cores and ranks.

    \b
    Examples:
      mok allocation
      mok allocation --json
    """
    from mok.session import allocation as describe

    found = describe()
    emit(found.summary_rows(), found.to_dict(), as_json)


@slurm_app.command()
def jupyter(
    folder: Annotated[Path, typer.Argument(help="Folder of notebooks.")] = Path(),
    time: Time = "2:00:00",
    nodes: Nodes = 1,
    gpus: Gpus = 0,
    partition: Partition = None,
    account: Account = None,
    extra: Extra = None,
    port: Annotated[int, typer.Option(help="Port on your own machine.")] = 8888,
    show: Print = False,
) -> None:
    """Serve JupyterLab inside an allocation: on its localhost, with a token; the job's log prints the tunnel's command.

    \b
    Examples:
      mok slurm jupyter notebooks --gpus 4 --time 4:00:00
      mok slurm jupyter --gpus 8 --partition batch --print
    """
    from mok.session import slurm

    request = slurm.Request(time, nodes, gpus, partition, account, tuple(extra or ()))
    _finish(slurm.jupyter_script(request, folder=folder.resolve(), port=port), "mok-jupyter", show)


@slurm_app.command()
def study(
    source: Annotated[Path, typer.Argument(help="The study's definition.")],
    runs: Annotated[Path | None, typer.Option(help="Folder of the ledger.")] = None,
    time: Time = "2:00:00",
    nodes: Nodes = 1,
    gpus: Gpus = 0,
    partition: Partition = None,
    account: Account = None,
    extra: Extra = None,
    show: Print = False,
) -> None:
    """Run a study as a job; submitted again, it goes on where the last one stopped.

    \b
    Examples:
      mok slurm study minibatch.toml --gpus 1 --time 1:00:00
      mok slurm study minibatch.toml --print
    """
    from mok.errors import require
    from mok.session import slurm

    require(source.is_file(), f"there is no study {source}.")
    request = slurm.Request(time, nodes, gpus, partition, account, tuple(extra or ()))
    script = slurm.study_script(source.resolve(), request, runs=None if runs is None else runs.resolve())
    _finish(script, "mok-study", show)


def _finish(script: str, name: str, show: bool) -> None:
    if show:
        sys.stdout.write(script)
        return
    from mok.session import slurm

    job = slurm.submit(script, name=f"{name}.sh")
    sys.stdout.write(f"submitted job {job}; its log is {name}-{job}.log\n")
