"""A sweep on your own cluster: any number of jobs that share a folder, under any scheduler.

Each job takes its share of the seeds and writes below the shared folder. A job that is killed is started again with
the same command: it goes on where it stopped. When all are done, one call reads everything. With SLURM:

    sbatch --array=0-3 --wrap 'python examples/own_cluster.py train --out /shared/sweep --job $SLURM_ARRAY_TASK_ID --jobs 4'
    python examples/own_cluster.py report --out /shared/sweep

On a SLURM cluster the bench can also submit the jobs itself: `tbbn sweep recipe.toml --engine slurm --job partition=gpu`.
To stop in time for a limit on the length of jobs, use the command line instead: `tbbn run recipe.toml --time-limit
3h50m` saves, stops and exits with code 75, which tells a scheduler to queue the job again.
"""

import argparse
from pathlib import Path

import tbbn

METHODS, NORMS, SEEDS = ["ft", "eeil"], ["bn", "tbbn"], 4


def train(out: Path, job: int, jobs: int, epochs: int) -> None:
    own = [seed for seed in range(SEEDS) if seed % jobs == job]
    if own:
        settings = {"train.epochs": epochs}
        tbbn.run(method=METHODS, norm=NORMS, data="digits", seeds=own, out=out / f"job-{job}", quiet=True, **settings)
    print(f"job {job} of {jobs}: seeds {own} done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("train", "report"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--job", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    if arguments.what == "train":
        train(arguments.out, arguments.job, arguments.jobs, arguments.epochs)
    else:
        print(tbbn.load(arguments.out))


if __name__ == "__main__":
    main()
