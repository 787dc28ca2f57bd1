"""`python -m selfspec`, and so `accelerate launch -m selfspec`."""

from selfspec.cli.main import run

if __name__ == "__main__":
    run()
