//! What is said to the kernel's ublk driver: its commands, its structures, its numbers.
//!
//! Written anew after `linux/ublk_cmd.h`, as far as it is used here. Names follow the header's. Everything is plain data at
//! fixed places; the sizes are asserted below, and a wrong one would be refused by the driver or, in a command that it
//! answers in, let it write beyond the structure.

use std::mem::{offset_of, size_of};

/// The node through which devices are added and removed.
pub(super) const CONTROL: &str = "/dev/ublk-control";

/// A command to the control device, or one of a queue's, as the driver numbers them: an ioctl's number, though it travels
/// through io_uring. The bare numbers of Linux 6.0 are refused by kernels built without them.
const fn command(direction: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number
}

const READ: u32 = 2;
const READ_WRITE: u32 = 3;

const fn control(direction: u32, number: u32) -> u32 {
    command(direction, number, size_of::<CtrlCmd>())
}

pub(super) const CMD_GET_DEV_INFO: u32 = control(READ, 0x02);
pub(super) const CMD_ADD_DEV: u32 = control(READ_WRITE, 0x04);
pub(super) const CMD_DEL_DEV: u32 = control(READ_WRITE, 0x05);
pub(super) const CMD_START_DEV: u32 = control(READ_WRITE, 0x06);
pub(super) const CMD_STOP_DEV: u32 = control(READ_WRITE, 0x07);
pub(super) const CMD_SET_PARAMS: u32 = control(READ_WRITE, 0x08);
/// Linux 6.5.
pub(super) const CMD_GET_FEATURES: u32 = control(READ, 0x13);
/// Linux 6.16: [`F_UPDATE_SIZE`].
pub(super) const CMD_UPDATE_SIZE: u32 = control(READ_WRITE, 0x15);

/// Takes the request of a tag for the first time.
pub(super) const IO_FETCH_REQ: u32 = command(READ_WRITE, 0x20, size_of::<IoCmd>());
/// Answers a tag's request and takes the next.
pub(super) const IO_COMMIT_AND_FETCH_REQ: u32 = command(READ_WRITE, 0x21, size_of::<IoCmd>());

/// The device outlives its server, and another may take it over.
pub(super) const F_USER_RECOVERY: u64 = 1 << 3;
/// Commands are numbered as above. Linux 6.4.
pub(super) const F_CMD_IOCTL_ENCODE: u64 = 1 << 6;
/// The bytes of requests are read from and written to the character device, at [`data_offset`]. Linux 6.5.
pub(super) const F_USER_COPY: u64 = 1 << 7;
/// While nobody serves it, requests fail instead of waiting. Linux 6.13.
pub(super) const F_USER_RECOVERY_FAIL_IO: u64 = 1 << 9;
/// [`CMD_UPDATE_SIZE`] is known.
pub(super) const F_UPDATE_SIZE: u64 = 1 << 10;

/// "Of no queue", in a control command.
pub(super) const NO_QUEUE: u16 = u16::MAX;
/// "Any number", where a device is added.
pub(super) const ANY_DEVICE: u32 = u32::MAX;

/// A sector, the unit of the driver's lengths whatever the blocks are.
pub(super) const SECTOR_BYTES: u64 = 512;

/// `struct ublksrv_ctrl_cmd`: the argument of control commands, in the command itself.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct CtrlCmd {
    pub dev_id: u32,
    pub queue_id: u16,
    /// How long what lies at `addr` is.
    pub len: u16,
    pub addr: u64,
    pub data: u64,
    pub dev_path_len: u16,
    pub pad: u16,
    pub reserved: u32,
}

/// `struct ublksrv_ctrl_dev_info`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct DevInfo {
    pub nr_hw_queues: u16,
    pub queue_depth: u16,
    pub state: u16,
    pub pad0: u16,
    pub max_io_buf_bytes: u32,
    pub dev_id: u32,
    pub ublksrv_pid: i32,
    pub pad1: u32,
    pub flags: u64,
    /// The server's own; the driver keeps it as it is.
    pub ublksrv_flags: u64,
    pub owner_uid: u32,
    pub owner_gid: u32,
    pub reserved1: u64,
    pub reserved2: u64,
}

pub(super) const ATTR_VOLATILE_CACHE: u32 = 1 << 2;
pub(super) const ATTR_FUA: u32 = 1 << 3;

/// `struct ublk_param_basic`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct ParamBasic {
    pub attrs: u32,
    pub logical_bs_shift: u8,
    pub physical_bs_shift: u8,
    pub io_opt_shift: u8,
    pub io_min_shift: u8,
    pub max_sectors: u32,
    pub chunk_sectors: u32,
    pub dev_sectors: u64,
    pub virt_boundary_mask: u64,
}

/// `struct ublk_param_discard`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct ParamDiscard {
    pub discard_alignment: u32,
    pub discard_granularity: u32,
    pub max_discard_sectors: u32,
    pub max_write_zeroes_sectors: u32,
    pub max_discard_segments: u16,
    pub reserved0: u16,
}

pub(super) const PARAM_TYPE_BASIC: u32 = 1 << 0;
pub(super) const PARAM_TYPE_DISCARD: u32 = 1 << 1;

/// The beginning of `struct ublk_params`; the driver goes by `len`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Params {
    pub len: u32,
    pub types: u32,
    pub basic: ParamBasic,
    pub discard: ParamDiscard,
    /// What the compiler would put there unseen.
    pub pad: u32,
}

/// `struct ublksrv_io_cmd`: the argument of a queue's commands.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct IoCmd {
    pub q_id: u16,
    pub tag: u16,
    /// Of a commit: bytes read or written, 0 for what has no bytes, or a negative errno.
    pub result: i32,
    /// Zero with [`F_USER_COPY`].
    pub addr: u64,
}

impl IoCmd {
    pub fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&self.q_id.to_ne_bytes());
        bytes[2..4].copy_from_slice(&self.tag.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.result.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.addr.to_ne_bytes());
        bytes
    }
}

impl CtrlCmd {
    /// As the 80 bytes of a command in io_uring.
    pub fn to_bytes(self) -> [u8; 80] {
        let mut bytes = [0; 80];
        bytes[..4].copy_from_slice(&self.dev_id.to_ne_bytes());
        bytes[4..6].copy_from_slice(&self.queue_id.to_ne_bytes());
        bytes[6..8].copy_from_slice(&self.len.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.data.to_ne_bytes());
        bytes[24..26].copy_from_slice(&self.dev_path_len.to_ne_bytes());
        bytes
    }
}

pub(super) const OP_READ: u8 = 0;
pub(super) const OP_WRITE: u8 = 1;
pub(super) const OP_FLUSH: u8 = 2;
pub(super) const OP_DISCARD: u8 = 3;
pub(super) const OP_WRITE_ZEROES: u8 = 5;

pub(super) const IO_F_FUA: u32 = 1 << 13;
/// Of zeroes: the blocks must stay allocated.
pub(super) const IO_F_NOUNMAP: u32 = 1 << 15;

/// `struct ublksrv_io_desc`: a request, in memory shared with the driver.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct IoDesc {
    /// The operation in the lowest byte, flags above it.
    pub op_flags: u32,
    pub nr_sectors: u32,
    pub start_sector: u64,
    pub addr: u64,
}

/// The most requests a queue can have.
const MAX_QUEUE_DEPTH: usize = 4096;

/// Where a queue's descriptors lie in the character device, for mmap(2).
pub(super) fn descriptors_offset(queue: u16, page_bytes: usize) -> u64 {
    let each = (MAX_QUEUE_DEPTH * size_of::<IoDesc>()).next_multiple_of(page_bytes);
    u64::from(queue) * each as u64
}

/// Where the bytes of a request begin in the character device, for pread(2) and pwrite(2).
pub(super) fn data_offset(queue: u16, tag: u16) -> u64 {
    const DATA: u64 = 0x8000_0000;
    DATA + (u64::from(queue) << 41 | u64::from(tag) << 25)
}

const _: () = {
    assert!(size_of::<CtrlCmd>() == 32 && offset_of!(CtrlCmd, addr) == 8 && offset_of!(CtrlCmd, dev_path_len) == 24);
    assert!(size_of::<DevInfo>() == 64 && offset_of!(DevInfo, flags) == 24 && offset_of!(DevInfo, reserved1) == 48);
    assert!(size_of::<ParamBasic>() == 32 && offset_of!(ParamBasic, dev_sectors) == 16);
    assert!(size_of::<ParamDiscard>() == 20 && offset_of!(ParamDiscard, max_discard_segments) == 16);
    assert!(size_of::<Params>() == 64 && offset_of!(Params, basic) == 8 && offset_of!(Params, discard) == 40);
    assert!(size_of::<IoCmd>() == 16 && offset_of!(IoCmd, addr) == 8);
    assert!(size_of::<IoDesc>() == 24 && offset_of!(IoDesc, start_sector) == 8);
    // Two of them, as the kernel's header has them computed for every architecture with plain ioctl numbers.
    assert!(CMD_ADD_DEV == 0xc020_7504 && IO_FETCH_REQ == 0xc010_7520 && CMD_GET_FEATURES == 0x8020_7513);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_and_tags_have_places_of_their_own() {
        assert_eq!(data_offset(0, 0), 0x8000_0000);
        assert_eq!(data_offset(1, 2), 0x8000_0000 + (1 << 41) + (2 << 25));
        assert_eq!(descriptors_offset(2, 4096), 2 * 98304);
    }

    #[test]
    fn a_commands_bytes_are_its_fields_in_their_order() {
        let io = IoCmd { q_id: 1, tag: 0x0203, result: -5, addr: 0 };
        assert_eq!(io.to_bytes(), [1, 0, 3, 2, 0xfb, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
        let control = CtrlCmd { dev_id: 7, queue_id: NO_QUEUE, len: 64, addr: 0x11, data: 0x22, ..CtrlCmd::default() };
        assert_eq!(control.to_bytes()[..18], [7, 0, 0, 0, 255, 255, 64, 0, 0x11, 0, 0, 0, 0, 0, 0, 0, 0x22, 0]);
    }
}
