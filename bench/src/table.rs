//! Columns of text: the first to the left, the others to the right.

use std::fmt;

/// Lines of cells, printed with every column as wide as its widest cell.
#[derive(Default)]
pub struct Table {
    lines: Vec<Vec<String>>,
}

impl Table {
    /// A table with these headings.
    pub fn new(headings: &[&str]) -> Table {
        Table { lines: vec![headings.iter().map(|&heading| heading.to_owned()).collect()] }
    }

    /// Adds a line.
    pub fn line(&mut self, cells: impl IntoIterator<Item = String>) {
        self.lines.push(cells.into_iter().collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.lines.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            self.lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for line in &self.lines {
            let mut text = String::new();
            for (column, cell) in line.iter().enumerate() {
                let width = widths[column];
                text += &if column == 0 { format!("  {cell:<width$}") } else { format!("  {cell:>width$}") };
            }
            writeln!(f, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

/// A cell of what may be missing.
pub fn cell(value: Option<impl fmt::Display>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Bytes as MiB with one digit behind the point.
pub fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

/// A size that somebody chose: whole MiB, or KiB.
pub fn size(bytes: u64) -> String {
    match bytes.is_multiple_of(1 << 20) {
        true => format!("{} MiB", bytes >> 20),
        false => format!("{} KiB", bytes >> 10),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let mut table = Table::new(&["side", "us"]);
        table.line(["zram:lz4".to_owned(), "10.5".to_owned()]);
        assert_eq!(table.to_string(), "  side        us\n  zram:lz4  10.5\n");
    }

    #[test]
    fn sizes_have_the_largest_unit_that_they_are_whole_in() {
        assert_eq!([size(256 << 10), size(1 << 20), size(64 << 20)], ["256 KiB", "1 MiB", "64 MiB"]);
        assert_eq!(size(1536 << 10), "1536 KiB");
    }
}
