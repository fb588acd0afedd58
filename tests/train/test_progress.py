import io

from rich.console import Console

from peagle_jax.train.progress import progress_bar


def test_a_full_bar_fits_a_hundred_columns():
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    note = "loss 12.345 length 2.91 1,234,567 tok/s"[:36]
    with progress_bar(console, "steps") as bar:
        bar.add_task("training", total=50_000, completed=12_345, note=note)
    shown = console.file.getvalue()
    assert note in shown and "training" in shown and "…" not in shown


def test_a_log_file_gets_no_bar():
    console = Console(file=io.StringIO(), width=100)
    with progress_bar(console, "steps") as bar:
        task = bar.add_task("training", total=2, note="")
        bar.update(task, completed=2, note="loss")
    assert console.file.getvalue() == ""
