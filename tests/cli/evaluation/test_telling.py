"""Documents with chosen facts."""

from __future__ import annotations

from word_codec import Words

from minikv.cli.evaluation import telling
from minikv.models.bundled import world


def choose(names: world.Names) -> list[world.Fact]:
    return [telling.tell(names, "town", "mayor"), telling.tell(names, "person", "room", value="17")]


def test_every_chosen_fact_is_told_and_the_length_is_as_asked() -> None:
    for tokens in (telling.LEAST, 1000):
        told = telling.fresh(Words(), tokens, 3, choose)
        assert abs(len(told.text.split()) - tokens) <= 16
        assert len(told.chosen) == 2
        assert len(told.others) >= 3
        for fact in (*told.chosen, *told.others):
            assert fact.statements[0] in told.text
            assert fact.answer in fact.statements[0]
        assert told.chosen[1].answer == "17"
    assert telling.fresh(Words(), 600, 3, choose) == telling.fresh(Words(), 600, 3, choose)
    assert telling.fresh(Words(), 600, 3, choose) != telling.fresh(Words(), 600, 4, choose)


def test_a_fact_is_told_as_the_world_tells_its_own() -> None:
    """Every wording names the entity before the value; both are what was given."""
    told = telling.fresh(
        Words(), 600, 1, lambda names: [telling.tell(names, "town", "mayor", "Velmora", "Ivo Kal")]
    )
    for statement in told.chosen[0].statements:
        assert 0 <= statement.index("Velmora") < statement.index("Ivo Kal")
    assert all("Velmora" in question for question in told.chosen[0].questions)
