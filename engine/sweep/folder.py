"""The folder of a sweep: `sweep.json`, a run directory for each point, and report.html."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.errors import Problem, RecipeError
from ..core.files import read_regular, write_asked
from ..core.run_dir import read_recipe
from ..core.text.display import format_value, remove_secret
from ..recipe.changes import compare
from ..recipe.load import Loaded, load_recipe
from ..report.page import write_page
from ..report.status import RunStatus, examine, is_run
from .points import Point

MANIFEST = "sweep.json"


@dataclass(frozen=True)
class Sweep:
    """A sweep: a recipe, the points to run, and the folder of the runs.

    Attributes:
        recipe: path of the recipe.
        overrides: `--set` values that apply to every point.
        points: the points of this call.
        folder: the folder with a run directory for each point.
    """

    recipe: Path
    overrides: tuple[str, ...]
    points: list[Point]
    folder: Path

    def settings(self, point: Point) -> list[str]:
        """Return the `--set` values of a point's run."""
        place = [f"run.dir={json.dumps(str(self.folder))}", f"run.name={json.dumps(point.name)}"]
        return [*self.overrides, *point.settings, *place, *self._resets]

    @cached_property
    def _resets(self) -> list[str]:
        """The `--set` values for a recipe with an experiment or lineage: the sweep is in theirs."""
        try:
            run = load_recipe(self.recipe, [*self.overrides, *self.points[0].settings]).recipe.run
        except RecipeError:
            return []  # reported when the points are loaded
        names = {"experiment": run.experiment, "lineage": run.lineage}
        return [f'run.{key}=""' for key, name in names.items() if name]

    def load(self, world: int | None = None) -> list[Loaded]:
        """Load and validate the recipe of each point.

        Args:
            world: the number of ranks of a run, or None if it is not known.

        Raises:
            RecipeError: recipes are invalid, or differ from those of checkpoints in the folder. All
                problems are listed.
        """
        loaded: list[Loaded] = []
        problems: dict[Problem, list[str]] = {}
        for point in self.points:
            try:
                one = load_recipe(self.recipe, self.settings(point), world)
                self._refuse_other_recipe(point, one)
                loaded.append(one)
            except RecipeError as error:
                for problem in error.problems:
                    problems.setdefault(problem, []).append(point.name)
        if problems:
            raise RecipeError([self._placed(*each) for each in problems.items()])
        return loaded

    def run_folder(self, point: Point) -> Path:
        """Return the run directory of a point."""
        return self.folder / point.name

    def statuses(self) -> dict[str, RunStatus | None]:
        """Return the status of each point by name, or None if its run has not started."""
        folders = {point.name: self.run_folder(point) for point in self.points}
        return {name: examine(path) if is_run(path) else None for name, path in folders.items()}

    def is_finished(self, point: Point) -> bool:
        """Return whether the run of a point has finished."""
        path = self.run_folder(point)
        return is_run(path) and examine(path).state == "finished"

    def write_manifest(self) -> None:
        """Write sweep.json, which keeps the points of earlier calls.

        Raises:
            EnvironmentFault: the file cannot be written.
        """
        content = {
            "recipe": str(self.recipe),
            "set": [remove_secret(text) for text in self.overrides],
            "points": [asdict(point) for point in self.all_points()],
        }
        self.write(MANIFEST, json.dumps(content, indent=1) + "\n")

    def all_points(self) -> list[Point]:
        """Return the points of earlier calls followed by the new ones of this call."""
        points = {point.name: point for point in _read_points(self.folder / MANIFEST)}
        return list((points | {point.name: point for point in self.points}).values())

    def write(self, name: str, text: str) -> Path:
        """Write a file into the folder.

        Raises:
            EnvironmentFault: the file cannot be written.
        """
        path = self.folder / name
        write_asked(path, text, replace=True, hint="give another folder with --dir")
        return path

    def write_report(self) -> Path | None:
        """Write report.html about all points that have started, and return the path, or None."""
        folders = [self.folder / point.name for point in self.all_points()]
        runs = [folder for folder in folders if is_run(folder)]
        if not runs:
            return None
        title = f"Sweep {self.folder.resolve().name}: {len(runs)} run{'s' * (len(runs) > 1)}"
        return self.write("report.html", write_page(runs, title))

    def _placed(self, problem: Problem, names: Sequence[str]) -> Problem:
        """Add the names of the affected points to a problem, unless all points have it."""
        if len(names) == len(self.points):
            return problem
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        message = f"{problem.message} (at {', '.join(names[:3])}{more})"
        return replace(problem, message=message)

    def _refuse_other_recipe(self, point: Point, loaded: Loaded) -> None:
        """Check that a run directory with a checkpoint was trained with the recipe of the point.

        Raises:
            RecipeError: the recipe of the earlier run differs.
        """
        path = self.run_folder(point)
        old = read_recipe(path)
        if not old or examine(path).checkpoint_step is None:
            return
        changes = compare(old, loaded.recipe.model_dump())
        problems = [
            Problem(
                f"is {format_value(after)} now, and {format_value(before)} in {path}",
                key,
                hint="give this sweep another --dir",
            )
            for key, before, after in changes
        ]
        if problems:
            raise RecipeError(problems)


def _read_points(path: Path) -> list[Point]:
    """Return the points of sweep.json with valid names; none if the file cannot be parsed."""
    try:
        entries: Any = json.loads(read_regular(path))["points"]
        return [
            Point(entry["name"], tuple(map(str, entry["settings"])))
            for entry in entries
            if re.fullmatch(r"\w[\w.-]{0,99}", entry["name"])
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
