"""The game of benchmarks/games.py that a study has a model learn."""

import pytest

from benchmarks.games import HigherLower


def played(number, guesses):
    """What is said after each guess, and the reward of the last."""
    game = HigherLower()
    game.init()
    game.number = number
    said = []
    for guess in guesses:
        answer, is_over, reward = game.step({"role": "assistant", "content": guess})
        said.append(answer)
        if is_over:
            break
    return said, reward


@pytest.mark.parametrize("number", [1, 6, HigherLower.LARGEST])
def test_every_number_is_found_by_halves(number):
    low, high = 1, HigherLower.LARGEST
    game = HigherLower()
    game.init()
    game.number = number
    for _ in range(HigherLower.MOST_GUESSES):
        guess = (low + high) // 2
        answer, is_over, reward = game.step({"role": "assistant", "content": str(guess)})
        if is_over:
            break
        low, high = (guess + 1, high) if answer == "Higher." else (low, guess - 1)
    assert is_over and reward == 1.0


def test_a_game_ends_after_its_last_guess_and_says_what_is_no_number():
    said, reward = played(9, ["12", "five", "3.", "10", "9"])
    assert said == ["Lower.", "Say a number.", "Higher.", "Lower."] and reward == 0.0
