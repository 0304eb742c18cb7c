"""What the documented commands work on, made once; what the helpers of these tests assert says what it has seen."""

import pytest

pytest.register_assert_rewrite("docs.rules", "docs.foreign", "docs.launchers", "docs.doing")


@pytest.fixture(scope="session")
def things(tmp_path_factory: pytest.TempPathFactory) -> "desk.Things":
    """A random model, a run of the small arithmetic task, rows, stand-in programs."""
    from e2e.running import command, finish

    from docs import desk, stand_ins
    from experiments.tiny import models

    made = desk.Things(folder=tmp_path_factory.mktemp("things"))
    stand_ins.rows(made.data)
    stand_ins.programs(made.bin)
    shape = models.Sizes(vocabulary=259, hidden=32, layers=1, heads=2, kv_heads=1, intermediate=32, positions=2048)
    models.make_random(shape, made.model, seed=0, chat=True)
    argv = command(made.cache, made.run, STEPS=4, sections__Evaluation__every=4)
    assert finish(argv, made.folder / "out") == 0, (made.folder / "out").read_text()
    return made
