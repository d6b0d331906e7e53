"""The closed formulas that people check a simulation against, each with its source.

* :mod:`~fsdpsim.ledger.model_states`: bytes per GPU of DDP, ZeRO and hybrid sharding
* :mod:`~fsdpsim.ledger.communication`: bytes that a GPU sends per step, and their bare time
* :mod:`~fsdpsim.ledger.quantised`: ZeRO++
* :mod:`~fsdpsim.ledger.layout`: which rank holds which elements
* :mod:`~fsdpsim.ledger.residual`, :mod:`~fsdpsim.ledger.fragmentation`: ZeRO-R
* :mod:`~fsdpsim.ledger.offload`: ZeRO-Offload's placements
* :mod:`~fsdpsim.ledger.infinity`: ZeRO-Infinity's bandwidths and sizes
* :mod:`~fsdpsim.ledger.runs`, :mod:`~fsdpsim.ledger.differences`: what the simulated runtimes
  hold and send, and every reason why that is not the formula

:mod:`~fsdpsim.ledger.views` apply them to a scenario; ``fsdpsim ledger`` prints that.
"""
