"""``.parquet`` files, read in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from cerebro.data.sources.arrow_tables import import_arrow, table_of
from cerebro.data.sources.base import Source, Table, choose, file_fingerprint
from cerebro.errors import InputError

BATCH_ROWS = 16_384


class ParquetSource(Source):
    """One file; types are those of Arrow."""

    kind = "parquet"

    def __init__(self, path: Path) -> None:
        import_arrow(f"'{path}'")
        self.path = path

    def fingerprint(self) -> str:
        return file_fingerprint(self.path)

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path) as file:
                names = choose(file.schema_arrow.names, wanted)
                first = 0
                for batch in file.iter_batches(BATCH_ROWS, columns=names):
                    yield table_of(batch, names, first)
                    first += batch.num_rows
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InputError(f"'{self.path}' is no Parquet file or is damaged: {error}") from None
