"""How a prompt becomes trajectories. A workflow is an async function with the signature of `single_turn.sample`."""
