//! What a cache counts, and what each number is called elsewhere.

/// One number: its name, cleancache's and zcache's where they had one, and what it means.
type Row = (&'static str, fn(&CacheStats) -> u64, &'static str);

/// The statistics of a cache at one moment. [`CacheStats::TABLE`] says what each means.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "TABLE is their documentation")]
pub struct CacheStats {
    pub succ_gets: u64,
    pub failed_gets: u64,
    pub puts: u64,
    pub failed_puts: u64,
    pub rejected_puts: u64,
    pub flushes: u64,
    pub evictions: u64,
    pub files: u64,
    pub pages_stored: u64,
    pub zero_pages: u64,
    pub grouped_pages: u64,
    pub orig_data_size: u64,
    pub compr_data_size: u64,
    pub mem_used_total: u64,
    pub memlimit: u64,
    pub mem_lent: u64,
}

impl CacheStats {
    /// Every statistic: name, value, meaning. Those up to `flushes` without `failed_puts` and `rejected_puts` are cleancache's, `zero_pages` to
    /// `memlimit` zcache's.
    pub const TABLE: &'static [Row] = &[
        ("succ_gets", |s| s.succ_gets, "Pages the kernel asked for that were found compressed, and not read below."),
        ("failed_gets", |s| s.failed_gets, "Pages that were read from below."),
        ("hit_percent", CacheStats::hit_percent, "succ_gets of both, in hundredths."),
        ("puts", |s| s.puts, "Pages that were stored."),
        ("failed_puts", |s| s.failed_puts, "Pages that were not: the limit, or a write came between."),
        (
            "rejected_puts",
            |s| s.rejected_puts,
            "Pages that do not compress, were not worth the time, or worth less than what is here.",
        ),
        ("flushes", |s| s.flushes, "Stored pages that were dropped because they were written to, or the file changed."),
        ("evictions", |s| s.evictions, "Stored pages that others took the place of, or that went for want of memory."),
        ("files", |s| s.files, "Files with stored pages."),
        ("pages_stored", |s| s.pages_stored, "Pages stored now."),
        ("zero_pages", |s| s.zero_pages, "Of them those that are one word repeated."),
        ("grouped_pages", |s| s.grouped_pages, "Of them those that were compressed again, sixteen together."),
        ("orig_data_size", |s| s.orig_data_size, "What the stored pages hold, in bytes."),
        ("compr_data_size", |s| s.compr_data_size, "What they are compressed to, in bytes."),
        ("mem_used_total", |s| s.mem_used_total, "Memory taken for them, tables and index included, in bytes."),
        ("memlimit", |s| s.memlimit, "The most it may be, in bytes."),
        ("mem_lent", |s| s.mem_lent, "How much less it may be now, as the machine is short of memory, in bytes."),
    ];

    /// Pages found, of all that were asked for, in hundredths.
    pub fn hit_percent(&self) -> u64 {
        (self.succ_gets * 100).checked_div(self.succ_gets + self.failed_gets).unwrap_or(0)
    }
}
