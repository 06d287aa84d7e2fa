//! The nine columns of IOzone: what each does to a file, record by record.
//!
//! | column         | which record comes after which                                  | as IOzone has it                         |
//! |----------------|-----------------------------------------------------------------|------------------------------------------|
//! | write          | in order, of a file that was not there                          | blocks are allocated, too                |
//! | rewrite        | in order, of one that was                                       |                                          |
//! | read, reread   | in order                                                        | each opens the file anew                 |
//! | random read    | every record once, shuffled                                     |                                          |
//! | random write   | every record once, shuffled                                     |                                          |
//! | backward read  | from the last to the first                                      |                                          |
//! | record rewrite | the first one again and again, as often as the file has records | a file of its own                        |
//! | stride read    | every 17th, then those after them                               | the last few are left out, others repeat |
//!
//! A file of up to 17 records has no stride: its records come in order (IOzone reads the first again and again).
//!
//! Two more are not IOzone's. Both read as many records as there are, each drawn without regard to those before: the uniform read out of all of them,
//! the skewed read nine of ten out of one tenth of the records.
//!
//! What is random is so by the number of the pass, so that it is the same on every side and another each time: reading one sequence twice says nothing
//! of random reads (a shuffled order that comes again is a cycle, and of draws that come again all is known).
//!
//! # Source
//! The test definitions of "IOzone Filesystem Benchmark" (iozone.org), and what IOzone 3 does where they leave it open.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// IOzone's default distance between two records of the stride read.
pub const STRIDE: u32 = 17;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the table above says it")]
pub enum Column {
    Write,
    Rewrite,
    Read,
    Reread,
    RandomRead,
    RandomWrite,
    BackwardRead,
    RecordRewrite,
    StrideRead,
    UniformRead,
    SkewedRead,
}

impl Column {
    /// Those of IOzone, in the order in which they are run.
    pub const ALL: [Column; 9] = [
        Column::Write,
        Column::Rewrite,
        Column::Read,
        Column::Reread,
        Column::RandomRead,
        Column::RandomWrite,
        Column::BackwardRead,
        Column::RecordRewrite,
        Column::StrideRead,
    ];

    /// As it is written in tables and on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Column::Write => "write",
            Column::Rewrite => "rewrite",
            Column::Read => "read",
            Column::Reread => "reread",
            Column::RandomRead => "random read",
            Column::RandomWrite => "random write",
            Column::BackwardRead => "backward read",
            Column::RecordRewrite => "record rewrite",
            Column::StrideRead => "stride read",
            Column::UniformRead => "uniform read",
            Column::SkewedRead => "skewed read",
        }
    }

    /// Whether it writes.
    pub fn writes(self) -> bool {
        matches!(self, Column::Write | Column::Rewrite | Column::RandomWrite | Column::RecordRewrite)
    }

    /// The records in the order in which they are used; as many as there are. What is random is another for each `pass`.
    pub fn order(self, records: u32, pass: u64) -> Vec<u32> {
        // Another for reads than for writes.
        let mut rng = fastrand::Rng::with_seed(pass << 8 | self as u64);
        match self {
            Column::Write | Column::Rewrite | Column::Read | Column::Reread => (0..records).collect(),
            Column::BackwardRead => (0..records).rev().collect(),
            Column::RecordRewrite => vec![0; records as usize],
            Column::StrideRead => {
                (0..STRIDE.min(records)).flat_map(|start| (start..records).step_by(STRIDE as usize)).collect()
            }
            Column::RandomRead | Column::RandomWrite => {
                let mut all: Vec<u32> = (0..records).collect();
                rng.shuffle(&mut all);
                all
            }
            Column::UniformRead => (0..records).map(|_| rng.u32(0..records)).collect(),
            Column::SkewedRead => {
                // One record of each ten, so that those that are read often lie all over the file.
                let often = |rng: &mut fastrand::Rng| rng.u32(0..records.div_ceil(10)) * 10;
                (0..records).map(|_| if rng.u32(0..10) > 0 { often(&mut rng) } else { rng.u32(0..records) }).collect()
            }
        }
    }
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

impl FromStr for Column {
    type Err = String;

    fn from_str(word: &str) -> Result<Column, String> {
        let known = || Column::ALL.into_iter().chain([Column::UniformRead, Column::SkewedRead]);
        let found = known().find(|column| column.word().replace(' ', "-") == word.replace(' ', "-"));
        found.ok_or_else(|| {
            let all: Vec<String> = known().map(|column| column.word().replace(' ', "-")).collect();
            format!("{word:?} is none of {}", all.join(", "))
        })
    }
}

/// How a file is got at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Through {
    /// A shared mapping (IOzone's -B, as in document 001).
    Mmap,
    /// pread(2) and pwrite(2).
    ReadWrite,
}

impl fmt::Display for Through {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(if *self == Through::Mmap { "mmap" } else { "read/write" })
    }
}

/// What the worker answers when it has run a column.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Answer {
    /// Which.
    pub column: Column,
    /// Bytes read or written.
    pub bytes: u64,
    /// Seconds that reading or writing took: neither opening, nor flushing, nor checking is in it.
    pub seconds: f64,
    /// Seconds of CPU that this took the worker; none where each record is timed by itself.
    pub cpu_s: Option<f64>,
    /// Seconds that the flush afterwards took (fsync, msync), which IOzone does not count either.
    pub flush_s: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_permutation(order: &[u32]) -> bool {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        sorted.iter().copied().eq(0..order.len() as u32)
    }

    #[test]
    fn every_column_but_the_record_rewrite_uses_each_record_once() {
        for column in Column::ALL {
            for records in [1, 2, 16, 17, 18, 34, 100, 4096] {
                let order = column.order(records, 0);
                assert_eq!(order.len(), records as usize, "{column}");
                let once = is_permutation(&order);
                assert_eq!(once, column != Column::RecordRewrite || records == 1, "{column} of {records}");
            }
        }
    }

    #[test]
    fn the_order_is_what_the_name_says() {
        assert_eq!(Column::Read.order(4, 0), [0, 1, 2, 3]);
        assert_eq!(Column::BackwardRead.order(4, 0), [3, 2, 1, 0]);
        assert_eq!(Column::RecordRewrite.order(4, 0), [0, 0, 0, 0]);
        let stride = Column::StrideRead.order(40, 0);
        assert_eq!(stride[..8], [0, 17, 34, 1, 18, 35, 2, 19]);
        assert_eq!(Column::StrideRead.order(17, 0), Column::Read.order(17, 0), "no stride");
    }

    #[test]
    fn random_is_neither_in_order_nor_the_same_in_another_pass() {
        let [read, write] = [Column::RandomRead, Column::RandomWrite].map(|column| column.order(4096, 0));
        assert_ne!(read, write);
        for column in [Column::RandomRead, Column::RandomWrite, Column::UniformRead, Column::SkewedRead] {
            let [first, again, second] = [0, 0, 1].map(|pass| column.order(4096, pass));
            assert_eq!(first, again, "{column}: every side is asked the same");
            let same = first.iter().zip(&second).filter(|(first, second)| first == second).count();
            // Of two skewed draws one in 500 or so is expected to be the same.
            assert!(same < 40, "{column}: {same} of 4096 records come at the same place again");
        }
        let neighbours = read.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) <= STRIDE).count();
        // Of a real shuffle 4096 x 34 / 4096 = 34 are expected.
        assert!(neighbours < 80, "{neighbours} of 4095 are close to the one before");
    }

    #[test]
    fn a_skewed_read_reads_nine_of_ten_records_out_of_a_tenth_of_them() {
        for records in [1, 9, 10, 4096] {
            let order = Column::SkewedRead.order(records, 0);
            assert_eq!(order.len(), records as usize);
            assert!(order.iter().all(|record| *record < records), "{records}");
        }
        let often = Column::SkewedRead.order(4096, 0).iter().filter(|record| *record % 10 == 0).count();
        // 91 of a hundred are expected.
        assert!((3600..3850).contains(&often), "{often} of 4096");
    }

    #[test]
    fn a_uniform_read_draws_each_record_without_regard_to_those_before() {
        let mut order = Column::UniformRead.order(4096, 0);
        assert_eq!(order.len(), 4096);
        order.sort_unstable();
        order.dedup();
        // Of so many draws out of so many, 1 - 1/e of the records are expected.
        assert!((2500..2680).contains(&order.len()), "{} of 4096", order.len());
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for column in Column::ALL.into_iter().chain([Column::UniformRead, Column::SkewedRead]) {
            assert_eq!(column.word().parse(), Ok(column));
            assert_eq!(column.word().replace(' ', "-").parse(), Ok(column));
        }
        assert!("fwrite".parse::<Column>().is_err());
    }
}
