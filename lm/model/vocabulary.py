"""Token embedding and output distribution, tied, with an adaptive form for large vocabularies.

With `cutoffs` the vocabulary (sorted by frequency) is cut into clusters: frequent words in a shortlist, the rest in tails whose
softmax is computed only for tokens that fall there. A tail's log-probability is its cluster's plus its own within the cluster.
With no cutoffs there is one cluster and everything here is the plain softmax.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import ModelConfig
from lm.model.checks import check_mask, check_targets
from lm.model.state import exact


class Embedding(nn.Module):
    """Ids to features, cluster by cluster."""

    table_0: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.edges = [0, *config.cutoffs, config.vocab_size]
        self.width = config.width
        for i, (first, last) in enumerate(zip(self.edges, self.edges[1:], strict=False)):
            narrow = max(1, config.width // config.cluster_divide**i)
            self.register_parameter(f"table_{i}", nn.Parameter(torch.randn(last - first, narrow) * config.embedding_std))
            if narrow != config.width:
                projection = nn.Parameter(torch.randn(narrow, config.width) / narrow**0.5)
                self.register_parameter(f"projection_{i}", projection)

    @property
    def clusters(self) -> int:
        """Number of clusters."""
        return len(self.edges) - 1

    def forward(self, tokens: Tensor) -> Tensor:
        """Features [..., d] of ids [...]."""
        if self.clusters == 1:
            return F.embedding(tokens, self.table_0)
        result = torch.zeros(*tokens.shape, self.width, device=tokens.device, dtype=self.table_0.dtype)
        for i, (first, last) in enumerate(zip(self.edges, self.edges[1:], strict=False)):
            here = (tokens >= first) & (tokens < last)
            # every token goes through every projection: a product of only those that are here would have as many rows as
            # there are such tokens in all lanes, and on some processors its rounding follows the number of rows
            found = F.embedding((tokens - first).clamp(0, last - first - 1), getattr(self, f"table_{i}"))
            projection = getattr(self, f"projection_{i}", None)
            result = torch.where(here[..., None], (found if projection is None else found @ projection).to(result.dtype), result)
        return result


class Head(nn.Module):
    """Features to log-probabilities and loss; the tables are the embedding's own tensors."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.edges, self.clusters = embedding.edges, embedding.clusters
        for name, parameter in embedding.named_parameters():
            self.register_parameter(name, parameter)
        if self.clusters > 1:
            self.cluster_vectors = nn.Parameter(torch.randn(self.clusters - 1, embedding.width) * 0.02)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab_size]: logits with one cluster, log-probabilities with several."""
        return self(hidden)

    def nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-probability of each target, in float32 at least, in the shape of `targets`."""
        return self(hidden, targets)

    def loss(self, hidden: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Summed negative log-probability of the targets (where `mask` is true). A sum, never a mean."""
        if mask is not None:
            check_mask(targets, mask)
        nll = self.nll(hidden, targets)
        return nll.sum() if mask is None else torch.where(mask, nll, 0).sum()

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """`logits`, or with targets `nll`: one forward, so that sharded training can gather the tables here."""
        if targets is None:
            return self._logits(hidden)
        check_targets(hidden, targets, self.edges[-1])
        nll = self._nll(hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1))
        return nll.view(targets.shape)

    def _scores(self, hidden: Tensor, cluster: int) -> Tensor:
        projection = getattr(self, f"projection_{cluster}", None)
        table: Tensor = getattr(self, f"table_{cluster}")
        if cluster == 0 and self.clusters > 1:
            table = torch.cat([table, self.cluster_vectors])
        return F.linear(hidden if projection is None else hidden @ projection.mT, table)

    def _logits(self, hidden: Tensor) -> Tensor:
        first = self._scores(hidden, 0)
        if self.clusters == 1:
            return first
        first = exact(first).log_softmax(-1)
        parts = [first[..., : self.edges[1]]]
        for i in range(1, self.clusters):
            reach = first[..., self.edges[1] + i - 1, None]
            parts.append(reach + exact(self._scores(hidden, i)).log_softmax(-1))
        return torch.cat(parts, -1)

    def _nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if self.clusters == 1:
            return F.cross_entropy(exact(self._scores(hidden, 0)), targets, reduction="none")
        shortlist = self.edges[1]
        edges = torch.tensor(self.edges[1:-1], device=targets.device)
        cluster = torch.bucketize(targets, edges, right=True)
        entry = torch.where(cluster == 0, targets, shortlist + cluster - 1)
        nll = F.cross_entropy(exact(self._scores(hidden, 0)), entry, reduction="none")
        for i in range(1, self.clusters):
            here = (cluster == i).nonzero().squeeze(-1)
            within = F.cross_entropy(exact(self._scores(hidden[here], i)), targets[here] - self.edges[i], reduction="none")
            nll = nll.index_add(0, here, within)
        return nll
