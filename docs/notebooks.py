"""Notebooks of the lessons and of the tour through 06, executed: python docs/notebooks.py [--out DIR] [FILE …]

They are made from the scripts and never edited. Prose gets its equations in LaTeX (maths.py). What a notebook imports
from this repository travels inside it, so that a single file runs in Jupyter or on Colab, where nothing else is.
"""

import argparse
import base64
import io
import os
import pathlib
import re
import zipfile

import jupytext
import nbclient
import nbformat

import maths

ROOT = pathlib.Path(__file__).resolve().parent.parent
LESSONS = sorted(ROOT.glob("0[1-5]_*.py"))
TOUR = ROOT / "docs" / "tour_06.py"
ALONE = ("*In the browser, without installing anything:* download this notebook, open "
         "[Colab](https://colab.research.google.com), choose *Upload*, then *Run all*. It brings along what it "
         "imports. *On your machine:* the same in Jupyter, with {needs} installed.")


def carried(script):
    """The files of this repository that a script needs to run alone."""
    if script != TOUR:
        return [ROOT / "utils.py", ROOT / "stale_world.py"]
    return [ROOT / "06_full_llm_training.py", ROOT / "utils.py", *sorted((ROOT / "under_the_hood").glob("*.py"))]


def carrier(files):
    """A folded cell that unpacks the files where they are missing. The same files give the same cell."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files:
            name = zipfile.ZipInfo(path.relative_to(ROOT).as_posix())
            name.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(name, path.read_bytes())
    text = base64.b64encode(packed.getvalue()).decode()
    return nbformat.v4.new_code_cell(
        "#@title What this notebook imports: unpacked here, unless it is there\n"
        "import base64, io, pathlib, zipfile\n"
        f'PACKED = "{text}"\n'
        f'if not pathlib.Path("{files[0].name}").exists():\n'
        "    zipfile.ZipFile(io.BytesIO(base64.b64decode(PACKED))).extractall()",
        metadata={"cellView": "form", "jupyter": {"source_hidden": True}, "tags": ["carried"]})


def opening(docstring):
    """A script's docstring → the notebook's first page: a title, prose, and what is to be typed as it is."""
    title, _, rest = docstring.strip().partition("\n")
    parts = [f"# {title.rstrip('.')}"]
    for paragraph in rest.strip().split("\n\n"):
        lines = paragraph.split("\n")
        typed = re.match(r"\s|Run |Run:|Run it|You see|You need|Before ", lines[0])
        parts.append("\n".join(["```text", *lines, "```"]) if typed else maths.inline(paragraph))
    return "\n\n".join(parts)


def to_notebook(script):
    """The notebook of a script of cells, not executed."""
    notebook = jupytext.read(script)
    first = notebook.cells.pop(0)
    docstring, _, code = first.source.strip().removeprefix('"""').partition('"""')
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = maths.inline(maths.blocks(cell.source))
    needs = "torch and matplotlib"
    if script == TOUR:
        needs = "torch, matplotlib and transformers 5 (on Colab first, in a cell: `%pip install 'transformers>=5'`)"
    head = [nbformat.v4.new_markdown_cell(opening(docstring)),
            nbformat.v4.new_markdown_cell(ALONE.format(needs=needs)), carrier(carried(script))]
    if code.strip():
        head.append(nbformat.v4.new_code_cell(code.strip()))
    notebook.cells[:0] = head
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    notebook.metadata = {"kernelspec": {"name": "python3", "language": "python", "display_name": "Python 3"},
                         "colab": {"name": f"{script.stem}.ipynb"}}
    return notebook


def execute(notebook, folder):
    """Run it from top to bottom in that folder; an error in a cell is an error here."""
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3",
                            resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times differ from run to run
    return notebook


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "notebooks", help="default runs/notebooks")
    parser.add_argument("files", nargs="*", type=pathlib.Path, metavar="FILE", help="default: 01 to 05 and the tour")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for script in [path.resolve() for path in arguments.files] or [*LESSONS, TOUR]:
        path = arguments.out / f"{script.stem}.ipynb"
        part = path.with_suffix(f".{os.getpid()}")  # whole or absent, also when two processes write it
        nbformat.write(execute(to_notebook(script), ROOT), part)
        part.replace(path)
        print(path)


if __name__ == "__main__":
    main()
