"""What no single value of a configuration shows of schedules."""

from __future__ import annotations

from llamarl.config.schema import Config

Rule = tuple[str, bool, str]  # the keys, whether they are wrong, the remedy


def schedule_rules(c: Config) -> list[Rule]:
    """Of options of the loss that follow a schedule."""
    examples = {"beta": "0.01", "log_reward_temperature": "2", "reference_temperature": "1"}
    rules = []
    for option, section in c.scheduled_options.items():
        has_option = isinstance(c.loss.options.get(option), int | float)
        follows = getattr(c, section).kind != "constant"
        what = f"needs a loss with an option {option}, and its first value: "
        rules.append(
            (
                f"{section}.kind loss.fn",
                follows and not has_option,
                f"{what}loss.{option}={examples[option]}",
            )
        )
    return rules
