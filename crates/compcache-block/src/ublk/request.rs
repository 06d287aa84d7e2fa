//! A request as the driver describes it, and how a lane serves it.
//!
//! | ublk's operation          | asked of the lane                            | result       |
//! |---------------------------|----------------------------------------------|--------------|
//! | READ                      | `read`, then the bytes go to the driver      | bytes        |
//! | WRITE, with FUA or not    | the bytes come from the driver, then `write` | bytes        |
//! | FLUSH                     | `flush`                                      | 0            |
//! | DISCARD                   | `discard`                                    | 0            |
//! | WRITE_ZEROES              | `write_zeroes`: holes, with NOUNMAP data     | 0            |
//! | any other                 | -                                            | -EOPNOTSUPP  |

use std::os::fd::BorrowedFd;

use rustix::io::{Errno, pread, pwrite};

use super::uapi::{
    IO_F_FUA, IO_F_NOUNMAP, IoDesc, OP_DISCARD, OP_FLUSH, OP_READ, OP_WRITE, OP_WRITE_ZEROES, SECTOR_BYTES, data_offset,
};
use crate::device::{Lane, Manner, Outcome, Zeroes};

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Read { offset_bytes: u64, length_bytes: usize },
    Write { offset_bytes: u64, length_bytes: usize, fua: bool },
    Flush,
    Discard { offset_bytes: u64, length_bytes: u64 },
    WriteZeroes { offset_bytes: u64, length_bytes: u64, zeroes: Zeroes },
    Unknown,
}

impl From<IoDesc> for Asked {
    fn from(request: IoDesc) -> Asked {
        let offset_bytes = request.start_sector.saturating_mul(SECTOR_BYTES);
        let length_bytes = u64::from(request.nr_sectors) * SECTOR_BYTES;
        match request.op_flags as u8 {
            OP_READ => Asked::Read { offset_bytes, length_bytes: length_bytes as usize },
            OP_WRITE => {
                let fua = request.op_flags & IO_F_FUA != 0;
                Asked::Write { offset_bytes, length_bytes: length_bytes as usize, fua }
            }
            OP_FLUSH => Asked::Flush,
            OP_DISCARD => Asked::Discard { offset_bytes, length_bytes },
            OP_WRITE_ZEROES => {
                let must_stay = request.op_flags & IO_F_NOUNMAP != 0;
                let zeroes = if must_stay { Zeroes::AreData } else { Zeroes::MayBeHoles };
                Asked::WriteZeroes { offset_bytes, length_bytes, zeroes }
            }
            _ => Asked::Unknown,
        }
    }
}

impl Asked {
    /// Bytes that the request carries either way.
    pub fn data_bytes(self) -> usize {
        match self {
            Asked::Read { length_bytes, .. } | Asked::Write { length_bytes, .. } => length_bytes,
            _ => 0,
        }
    }

    /// Serves it, and says what the driver is to be told.
    pub fn serve(self, lane: &mut dyn Lane, buffer: &mut [u8], data: &Data<'_>, may_wait: bool) -> Outcome<i32> {
        let manner = Manner { may_wait, fua: false };
        let served = match self {
            Asked::Read { offset_bytes, length_bytes } => {
                let Some(into) = buffer.get_mut(..length_bytes) else { return Outcome::Done(failed(Errno::IO)) };
                let served = lane.read(offset_bytes, into, manner);
                if served == Ok(Outcome::Done(()))
                    && let Err(error) = data.give(into)
                {
                    return Outcome::Done(failed(error));
                }
                served
            }
            Asked::Write { offset_bytes, length_bytes, fua } => {
                let Some(from) = buffer.get_mut(..length_bytes) else { return Outcome::Done(failed(Errno::IO)) };
                if let Err(error) = data.take(from) {
                    return Outcome::Done(failed(error));
                }
                lane.write(offset_bytes, from, Manner { fua, ..manner })
            }
            Asked::Flush => lane.flush(manner),
            Asked::Discard { offset_bytes, length_bytes } => lane.discard(offset_bytes, length_bytes, manner),
            Asked::WriteZeroes { offset_bytes, length_bytes, zeroes } => {
                lane.write_zeroes(offset_bytes, length_bytes, zeroes, manner)
            }
            Asked::Unknown => return Outcome::Done(failed(Errno::OPNOTSUPP)),
        };
        match served {
            Ok(Outcome::Done(())) => Outcome::Done(self.data_bytes() as i32),
            // A device that must wait even where it may breaks its contract.
            Ok(Outcome::MustWait) if may_wait => Outcome::Done(failed(Errno::IO)),
            Ok(Outcome::MustWait) => Outcome::MustWait,
            Err(error) => Outcome::Done(-error.errno()),
        }
    }
}

pub(super) fn failed(error: Errno) -> i32 {
    -error.raw_os_error()
}

/// The bytes of a request in flight, which the driver has.
pub(super) struct Data<'a> {
    device: BorrowedFd<'a>,
    at: u64,
}

impl<'a> Data<'a> {
    pub fn of(device: BorrowedFd<'a>, queue: u16, tag: u16) -> Data<'a> {
        Data { device, at: data_offset(queue, tag) }
    }

    /// Copies what is to be written into `into`.
    fn take(&self, into: &mut [u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < into.len() {
            match pread(self.device, &mut into[done..], self.at + done as u64) {
                Ok(0) => return Err(Errno::IO),
                Ok(bytes) => done += bytes,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Copies what was read to where it was asked for.
    fn give(&self, from: &[u8]) -> Result<(), Errno> {
        let mut done = 0;
        while done < from.len() {
            match pwrite(self.device, &from[done..], self.at + done as u64) {
                Ok(0) => return Err(Errno::IO),
                Ok(bytes) => done += bytes,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use super::*;
    use crate::device::BlockDevice;
    use crate::{Array, Delayed};

    fn described(op: u8, flags: u32, start_sector: u64, nr_sectors: u32) -> Asked {
        IoDesc { op_flags: u32::from(op) | flags, nr_sectors, start_sector, addr: 0 }.into()
    }

    #[test]
    fn sectors_become_bytes_and_flags_what_they_mean() {
        assert_eq!(described(OP_READ, 0, 8, 16), Asked::Read { offset_bytes: 4096, length_bytes: 8192 });
        let written = |fua| Asked::Write { offset_bytes: 0, length_bytes: 4096, fua };
        assert_eq!(described(OP_WRITE, 0, 0, 8), written(false));
        assert_eq!(described(OP_WRITE, IO_F_FUA | IO_F_NOUNMAP, 0, 8), written(true));
        assert_eq!(described(OP_DISCARD, 0, 8, 8), Asked::Discard { offset_bytes: 4096, length_bytes: 4096 });
        let zeroes = |zeroes| Asked::WriteZeroes { offset_bytes: 0, length_bytes: 4096, zeroes };
        assert_eq!(described(OP_WRITE_ZEROES, 0, 0, 8), zeroes(Zeroes::MayBeHoles));
        assert_eq!(described(OP_WRITE_ZEROES, IO_F_NOUNMAP, 0, 8), zeroes(Zeroes::AreData));
        assert_eq!(described(4, 0, 0, 8), Asked::Unknown);
        let beyond_all = described(OP_DISCARD, 0, u64::MAX, u32::MAX);
        assert!(matches!(beyond_all, Asked::Discard { offset_bytes: u64::MAX, .. }));
    }

    /// A file in the driver's place: the bytes of queue 0, tag 0 lie where the driver has them.
    #[test]
    fn what_is_written_is_read_and_results_are_what_the_driver_wants() {
        let file = tempfile::tempfile().unwrap();
        let data = Data::of(file.as_fd(), 0, 0);
        let mut lane = Arc::new(Array::new(1 << 20).unwrap()).lane().unwrap();
        let mut buffer = vec![0; 8192];
        let mut serve = |asked: Asked| asked.serve(&mut *lane, &mut buffer, &data, false);
        pwrite(&file, &[7; 8192], data.at).unwrap();
        assert_eq!(serve(described(OP_WRITE, IO_F_FUA, 8, 16)), Outcome::Done(8192));
        pwrite(&file, &[0; 8192], data.at).unwrap();
        assert_eq!(serve(described(OP_READ, 0, 8, 16)), Outcome::Done(8192));
        let mut back = [0; 8192];
        pread(&file, &mut back, data.at).unwrap();
        assert_eq!(back, [7; 8192]);
        assert_eq!(serve(described(OP_DISCARD, 0, 8, 8)), Outcome::Done(0));
        assert_eq!(serve(described(OP_READ, 0, 8, 16)), Outcome::Done(8192));
        pread(&file, &mut back, data.at).unwrap();
        assert!(back[..4096].iter().all(|byte| *byte == 0) && back[4096..].iter().all(|byte| *byte == 7));
        assert_eq!(serve(described(OP_FLUSH, 0, 0, 0)), Outcome::Done(0));
        // Beyond the end: as the device says. More than a buffer holds, and what nobody knows: refused.
        assert_eq!(serve(described(OP_READ, 0, 2048, 8)), Outcome::Done(-22));
        assert_eq!(serve(described(OP_WRITE, 0, 2048, 8)), Outcome::Done(-28));
        assert_eq!(serve(described(OP_READ, 0, 0, 17)), Outcome::Done(-5));
        assert_eq!(serve(described(9, 0, 0, 8)), Outcome::Done(-95));
    }

    #[test]
    fn a_request_waits_only_where_it_may() {
        let file = tempfile::tempfile().unwrap();
        let data = Data::of(file.as_fd(), 0, 0);
        let slow = Delayed::new(Arc::new(Array::new(8192).unwrap()), 0..4096, std::time::Duration::from_millis(1));
        let mut lane = Arc::new(slow).lane().unwrap();
        let mut buffer = vec![0; 4096];
        let read = described(OP_READ, 0, 0, 8);
        assert_eq!(read.serve(&mut *lane, &mut buffer, &data, false), Outcome::MustWait);
        assert_eq!(read.serve(&mut *lane, &mut buffer, &data, true), Outcome::Done(4096));
    }
}
