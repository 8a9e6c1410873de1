"""How many machines a load needs: measured figures, arithmetic, and a simulation that predicts latency. `pmi plan`."""
