//! The loop device: taken, told its size, detached.
//!
//! None of these functions leaves the device open. Were the serving process the last that has it open, closing it would
//! write out what the page cache holds for it, to the process itself; a process that is being killed cannot answer.
#![allow(unsafe_code)]

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use linux_raw_sys::general::O_DIRECT;
use linux_raw_sys::loop_device::{
    LO_FLAGS_DIRECT_IO, LOOP_CLR_FD, LOOP_CONFIGURE, LOOP_CTL_GET_FREE, LOOP_GET_STATUS64, LOOP_SET_CAPACITY,
    LOOP_SET_STATUS64, loop_config, loop_info64,
};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;
use rustix::ioctl::{Getter, Ioctl, IoctlOutput, NoArg, Opcode, Setter, ioctl};

use super::error::{FuseLoopError, Step};
use super::file::FILE_MODE;
use crate::node::{Claim, Holder, LOOKED_AT, Node, NotClaimed, PAUSE};

// The sizes of the kernel's structures, on every architecture.
const _: () = assert!(size_of::<loop_info64>() == 232 && size_of::<loop_config>() == 304);

/// How many free devices are tried before it is said that others take them all.
const ATTEMPTS: u32 = 64;

/// In such units the kernel tells sizes.
const SECTOR_BYTES: u64 = 512;

/// A loop device that is ours.
#[derive(Debug)]
pub(super) struct LoopDevice {
    number: u32,
    /// The file under it.
    file: PathBuf,
}

impl LoopDevice {
    /// Sets up a free loop device with such sectors over `file`, which the caller serves.
    pub fn attach(control: &File, file: &Path, sector_bytes: u32) -> Result<LoopDevice, FuseLoopError> {
        let open = OpenOptions::new().read(true).write(true).custom_flags(O_DIRECT as i32).open(file);
        let backing = OwnedFd::from(open.map_err(FuseLoopError::at(Step::File, file))?);
        for _ in 0..ATTEMPTS {
            // SAFETY: the request takes no argument and returns a number.
            let number = unsafe { ioctl(control, GetFree) };
            let number = number.map_err(FuseLoopError::at(Step::FreeLoop, Path::new(CONTROL)))?;
            let device = LoopDevice { number, file: file.to_owned() };
            let node = device.path();
            let opened = match OpenOptions::new().read(true).write(true).open(&node) {
                // Somebody else was faster, and is letting go of it.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::NXIO) => continue,
                opened => opened.map_err(FuseLoopError::at(Step::OpenLoop, &node))?,
            };
            match configure(&opened, &backing, sector_bytes) {
                Ok(()) => {}
                // Somebody else was faster.
                Err(Errno::BUSY) => continue,
                Err(error) => return Err(FuseLoopError::at(Step::Configure, &node)(error)),
            }
            let usable = match attribute(number, "loop/dio").is_some_and(|value| value == Path::new("1")) {
                true => device.pass_flushes_on(),
                false => Err(FuseLoopError::NotDirect { path: node }),
            };
            if usable.is_err() {
                // SAFETY: the request takes no argument. The device is ours, configured above.
                let _ = unsafe { ioctl(&opened, NoArg::<{ LOOP_CLR_FD as Opcode }>::new()) };
            }
            return usable.map(|()| device);
        }
        Err(FuseLoopError::NoneFree { attempts: ATTEMPTS })
    }

    /// The loop devices over `file`, whoever set them up.
    pub fn over(file: &Path) -> io::Result<Vec<LoopDevice>> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/sys/block")? {
            let name = entry?.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("loop")).and_then(|rest| rest.parse().ok());
            let Some(number) = number else { continue };
            let device = LoopDevice { number, file: file.to_owned() };
            if device.is_attached() {
                found.push(device);
            }
        }
        Ok(found)
    }

    /// `/dev/loopN`.
    pub fn path(&self) -> PathBuf {
        self.node().path()
    }

    /// Has the device take the size of the file. Asks the server for it.
    pub fn resized(&self) -> Result<(), FuseLoopError> {
        let path = self.path();
        if !self.is_attached() {
            return Err(FuseLoopError::Detached { path });
        }
        let size_bytes = self.remember_size().map_err(FuseLoopError::at(Step::Remember, &self.file))?;
        let opened = File::open(&path).map_err(FuseLoopError::at(Step::OpenLoop, &path))?;
        // SAFETY: the request takes no argument.
        unsafe { ioctl(opened, NoArg::<{ LOOP_SET_CAPACITY as Opcode }>::new()) }
            .map_err(FuseLoopError::at(Step::Resize, &path))?;
        let sectors = fs::read_to_string(format!("/sys/block/loop{}/size", self.number));
        match sectors.map_err(FuseLoopError::at(Step::Resize, &path))?.trim().parse::<u64>() {
            Ok(sectors) if sectors == size_bytes / SECTOR_BYTES => Ok(()),
            _ => Err(FuseLoopError::at(Step::Resize, &path)(io::Error::other("it has another size"))),
        }
    }

    /// Has the kernel remember the size that the file has now, which is the answer. Direct reads end where it believes the file to end, and before
    /// Linux 6.16 the device takes that size.
    ///
    /// What it is told when it asks for the size it drops if a read or a write has ended meanwhile (`fuse_change_attributes`), as on a disk in use
    /// some always have. What is told of a file whose mode was set it takes in any case (`fuse_do_setattr`); but to set one waits for discards and
    /// zeroes in flight, so it is asked first.
    ///
    /// # Source
    /// Linux `fs/fuse/inode.c` and `fs/fuse/dir.c`.
    fn remember_size(&self) -> io::Result<u64> {
        let size_bytes = fs::metadata(&self.file)?.len();
        let is_remembered = || {
            let seen = statx(CWD, &self.file, AtFlags::STATX_DONT_SYNC, StatxFlags::SIZE)?;
            io::Result::Ok(seen.stx_size == size_bytes)
        };
        if is_remembered()? {
            return Ok(size_bytes);
        }
        fs::set_permissions(&self.file, Permissions::from_mode(FILE_MODE.into()))?;
        if is_remembered()? { Ok(size_bytes) } else { Err(io::Error::other("it remembers another")) }
    }

    /// Claims the device unless somebody uses it. Detached by somebody else, it may be anybody's by now, and is left alone.
    pub fn claim(&self) -> Result<Claim, FuseLoopError> {
        self.node().claim(|| self.is_attached()).map_err(|not| match not {
            NotClaimed::InUse(by) => FuseLoopError::InUse { path: self.path(), by },
            NotClaimed::Open(error) => FuseLoopError::at(Step::OpenLoop, &self.path())(error),
        })
    }

    fn node(&self) -> Node {
        Node::new(format!("loop{}", self.number))
    }

    /// Detaches the device, which was claimed, and returns when it is gone.
    ///
    /// Nobody can mount it or swap to it meanwhile. Somebody who opens it at the very moment it is
    /// detached keeps it until he closes it; that is waited for, and said to be a use of it if it takes long.
    pub fn detach(&self, claimed: Claim) -> Result<(), FuseLoopError> {
        let Claim(Some(claimed)) = claimed else { return Ok(()) };
        self.clear(&claimed)?;
        drop(claimed);
        let give_up = Instant::now() + LOOKED_AT;
        while self.is_attached() {
            if Instant::now() > give_up {
                let by = self.node().used_by(-1).unwrap_or(Holder::Unknown);
                return Err(FuseLoopError::InUse { path: self.path(), by });
            }
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Detaches the device from whoever uses it: at once if nobody does, else when the last of them closes it.
    pub fn let_go(&self) {
        let Ok(opened) = File::open(self.path()) else { return };
        if self.is_attached() {
            let _ = self.clear(&opened);
        }
    }

    fn clear(&self, opened: &File) -> Result<(), FuseLoopError> {
        // SAFETY: the request takes no argument. What it detaches is over our file: that was looked up, and a device that
        // is attached is not given to others.
        match unsafe { ioctl(opened, NoArg::<{ LOOP_CLR_FD as Opcode }>::new()) } {
            Ok(()) | Err(Errno::NXIO) => Ok(()),
            Err(error) => Err(FuseLoopError::at(Step::Detach, &self.path())(error)),
        }
    }

    /// Sees to it that flushes reach the file. The kernel keeps a loop device's `write through`, which somebody may have set, for
    /// whoever has the device next, and then answers flushes itself.
    fn pass_flushes_on(&self) -> Result<(), FuseLoopError> {
        let path = PathBuf::from(format!("/sys/block/loop{}/{WRITE_CACHE}", self.number));
        let is_on = || attribute(self.number, WRITE_CACHE).is_some_and(|value| value == Path::new(WRITE_BACK));
        if is_on() {
            return Ok(());
        }
        fs::write(&path, WRITE_BACK).map_err(FuseLoopError::at(Step::WriteCache, &path))?;
        let refused = io::Error::new(io::ErrorKind::Unsupported, "the kernel keeps it as it is");
        if is_on() { Ok(()) } else { Err(FuseLoopError::at(Step::WriteCache, &path)(refused)) }
    }

    /// Whether the device is still over our file.
    fn is_attached(&self) -> bool {
        // Its name is nobody else's; the path before it is gone with the mount, if that was in a namespace of the server's.
        attribute(self.number, "loop/backing_file").is_some_and(|file| file.file_name() == self.file.file_name())
    }
}

/// The node through which loop devices are had.
pub(super) const CONTROL: &str = "/dev/loop-control";

/// Whether a device passes flushes on, and what it says then.
const WRITE_CACHE: &str = "queue/write_cache";
const WRITE_BACK: &str = "write back";

/// The number of the block device that a loop device, anybody's, is over; or of that which the file system is on that has its file. The latter is of no
/// device (its major number is 0) where the file system is on several, or on none.
///
/// # Errors
/// It cannot be opened, or is over nothing.
pub fn lies_on(device: &Path) -> io::Result<u64> {
    let opened = File::open(device)?;
    // SAFETY: the request writes one `struct loop_info64`, whose size is asserted above and is that of the value it is given.
    let info = unsafe { ioctl(opened, Getter::<{ LOOP_GET_STATUS64 as Opcode }, loop_info64>::new()) }?;
    Ok(if info.lo_rdevice != 0 { info.lo_rdevice } else { info.lo_device })
}

/// Has a loop device of a server that is dead fail all it is asked for at once: it has one sector. Else each request goes to the device's own thread first, to fail there.
///
/// # Errors
/// It cannot be opened, or is no loop device that is in use.
pub fn cut_off(device: &Path) -> io::Result<()> {
    let opened = File::open(device)?;
    let info = loop_info64 { lo_sizelimit: SECTOR_BYTES, lo_flags: 0, ..INFO };
    // SAFETY: the request reads one `struct loop_info64`, whose size is asserted above.
    Ok(unsafe { ioctl(opened, Setter::<{ LOOP_SET_STATUS64 as Opcode }, loop_info64>::new(info)) }?)
}

/// An attribute of a loop device that is in use.
fn attribute(number: u32, name: &str) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStringExt;
    let mut value = fs::read(format!("/sys/block/loop{number}/{name}")).ok()?;
    if value.last() == Some(&b'\n') {
        value.pop();
    }
    Some(PathBuf::from(std::ffi::OsString::from_vec(value)))
}

/// All of a file, read and written past the page cache.
const INFO: loop_info64 = loop_info64 {
    lo_device: 0,
    lo_inode: 0,
    lo_rdevice: 0,
    lo_offset: 0,
    lo_sizelimit: 0,
    lo_number: 0,
    lo_encrypt_type: 0,
    lo_encrypt_key_size: 0,
    lo_flags: LO_FLAGS_DIRECT_IO as u32,
    lo_file_name: [0; 64],
    lo_crypt_name: [0; 64],
    lo_encrypt_key: [0; 32],
    lo_init: [0; 2],
};

/// `LOOP_CONFIGURE`: everything in one step, so that the device never is there half set up.
fn configure(opened: &File, backing: &OwnedFd, sector_bytes: u32) -> Result<(), Errno> {
    let config =
        loop_config { fd: backing.as_raw_fd() as u32, block_size: sector_bytes, info: INFO, __reserved: [0; 8] };
    // SAFETY: the request reads one `struct loop_config`, whose size is asserted above; the descriptor in it is open
    // until after the call. A wrong field could make the device read-only or of another size, not touch our memory.
    unsafe { ioctl(opened, Setter::<{ LOOP_CONFIGURE as Opcode }, loop_config>::new(config)) }
}

/// `LOOP_CTL_GET_FREE`, whose answer is what the system call returns.
struct GetFree;

// SAFETY: the request takes no argument, so no memory is shared with the kernel.
unsafe impl Ioctl for GetFree {
    type Output = u32;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        LOOP_CTL_GET_FREE as Opcode
    }

    fn as_ptr(&mut self) -> *mut core::ffi::c_void {
        std::ptr::null_mut()
    }

    unsafe fn output_from_ptr(output: IoctlOutput, _: *mut core::ffi::c_void) -> rustix::io::Result<u32> {
        Ok(output as u32)
    }
}
