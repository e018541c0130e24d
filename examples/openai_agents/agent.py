"""An agent of the OpenAI Agents SDK as a workflow: it has a calculator, and its answer is scored by the reward."""

import ast
import operator

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import APIStatusError, AsyncOpenAI

from areal_megatron.workflows.episode import Episode

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(node: ast.AST) -> float:
    """Returns the value of a formula of numbers, + - * / and brackets. Raises ValueError for anything else."""
    match node:
        case ast.Expression(body=body):
            return value(body)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value(left), value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -value(operand)
        case ast.Constant(value=int() | float() as number):
            return float(number)
    raise ValueError("only numbers, + - * / and brackets")


@function_tool
def calculate(formula: str) -> str:
    """Computes a formula of numbers, + - * / and brackets.

    Args:
        formula: such as 3 * (4 + 5)
    """
    try:
        return f"{value(ast.parse(formula.strip()[:200], mode='eval')):g}"
    except (ArithmeticError, RecursionError, SyntaxError, ValueError) as e:
        return f"error: {e}"


async def run(episode: Episode) -> None:
    """Runs the agent; the reward function scores its last answer, also of one that uses up its turns or tokens."""
    async with episode.openai() as api, AsyncOpenAI(base_url=api.url, api_key=api.key, max_retries=0) as client:
        agent = Agent(
            name="solver",
            model=OpenAIChatCompletionsModel(model="policy", openai_client=client),
            tools=[calculate],
        )
        try:
            await Runner.run(
                agent, episode.prompt.text, max_turns=episode.turns, run_config=RunConfig(tracing_disabled=True)
            )
        except MaxTurnsExceeded:
            pass
        except APIStatusError as e:
            if e.code not in ("context_length_exceeded", "turns_exceeded"):
                raise
