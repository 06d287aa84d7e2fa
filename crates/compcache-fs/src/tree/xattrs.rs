//! Extended attributes, ACLs among them.

use std::ffi::OsStr;

use fuser::INodeNo;
use rustix::fs::{StatVfsMountFlags, XattrFlags, getxattr, getxattr_query, listxattr, removexattr, setxattr};
use rustix::io::{self, Errno};

use super::Tree;
use super::control::Control;
use crate::caller::{Caller, as_owner, in_own_room, unchecked};

/// The kernel lists no more.
const LIST_BYTES_MAX: usize = 64 << 10;

/// What POSIX's ACLs are called as attributes.
const ACLS: [&str; 2] = ["system.posix_acl_access", "system.posix_acl_default"];

/// What rights a program gets that is run.
const CAPABILITIES: &str = "security.capability";

/// What is answered to who asks for a value.
pub enum Value {
    /// He asked for its length alone.
    Length(usize),
    Bytes(Vec<u8>),
}

impl Value {
    /// A value that is known, for who has room for `size_max`.
    pub fn of(bytes: Vec<u8>, size_max: u32) -> io::Result<Value> {
        match bytes.len() {
            length if size_max == 0 => Ok(Value::Length(length)),
            length if length > size_max as usize => Err(Errno::RANGE),
            _ => Ok(Value::Bytes(bytes)),
        }
    }
}

impl Tree {
    pub fn attribute(&self, caller: Caller, number: INodeNo, name: &OsStr, size_max: u32) -> io::Result<Value> {
        if let Some(read) = self.read_control(caller, number, name) {
            return Value::of(read?.into_bytes(), size_max);
        }
        let node = self.inodes.get(number)?;
        if name == CAPABILITIES && node.limits.contains(StatVfsMountFlags::NOSUID) {
            return Err(Errno::NODATA);
        }
        let path = node.path();
        // The kernel asks for a file's ACL when somebody uses it who does not own it, and takes any other answer than "none" for a
        // failure of that use: also where the file system below has no ACLs of this kind, as NFS 4 has not.
        let without_acls = |error| match error {
            Errno::OPNOTSUPP if ACLS.iter().any(|acl| name == *acl) => Errno::NODATA,
            error => error,
        };
        let get = || {
            if size_max == 0 {
                return getxattr_query(&path, name).map(Value::Length).map_err(without_acls);
            }
            let mut value = vec![0; size_max as usize];
            let length = getxattr(&path, name, &mut *value).map_err(without_acls)?;
            if length > value.len() {
                return Err(Errno::RANGE);
            }
            value.truncate(length);
            Ok(Value::Bytes(value))
        };
        if is_checked(caller, name) { get() } else { unchecked(caller, get) }
    }

    /// The names; those that begin with `trusted.` for root alone, as file systems list them, and none that has no value here.
    pub fn attribute_names(&self, caller: Caller, number: INodeNo, size_max: u32) -> io::Result<Value> {
        let node = self.inodes.get(number)?;
        let mut names = vec![0; LIST_BYTES_MAX];
        let length = listxattr(node.path(), &mut *names)?;
        names.truncate(length);
        let has_no_capabilities = node.limits.contains(StatVfsMountFlags::NOSUID);
        if caller.uid != 0 || has_no_capabilities {
            let is_listed = |name: &&[u8]| {
                let is_roots = name.starts_with(b"trusted.") && caller.uid != 0;
                let is_theirs = has_no_capabilities && name.strip_suffix(b"\0") == Some(CAPABILITIES.as_bytes());
                !is_roots && !is_theirs
            };
            names = names.split_inclusive(|byte| *byte == 0).filter(is_listed).flatten().copied().collect();
        }
        Value::of(names, size_max)
    }

    pub fn set_attribute(
        &self,
        caller: Caller,
        number: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
    ) -> io::Result<()> {
        if let Some(control) = Control::named(number, name) {
            return self.control(caller, control, value);
        }
        let node = self.inodes.get(number)?;
        let set = || setxattr(node.path(), name, value, XattrFlags::from_bits_retain(flags as u32));
        changing(caller, name, set)
    }

    pub fn remove_attribute(&self, caller: Caller, number: INodeNo, name: &OsStr) -> io::Result<()> {
        let node = self.inodes.get(number)?;
        let remove = || removexattr(node.path(), name);
        changing(caller, name, remove)
    }
}

/// Changes an attribute with the rights that are right for it: to change an ACL is to change the mode.
fn changing(caller: Caller, name: &OsStr, mut change: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    if ACLS.iter().any(|acl| name == *acl) {
        return as_owner(caller, change);
    }
    if name.as_encoded_bytes().starts_with(b"user.") {
        return in_own_room(caller, change);
    }
    if is_checked(caller, name) { change() } else { unchecked(caller, change) }
}

/// Whether the kernel above has decided that `caller` may read or change this. Attributes of the system, but for POSIX's ACLs, it leaves to the file system, which knows
/// what they are (ACLs of NFS 4, for one); so do we.
fn is_checked(caller: Caller, name: &OsStr) -> bool {
    caller.uid == 0 || !name.as_encoded_bytes().starts_with(b"system.") || ACLS.iter().any(|acl| name == *acl)
}
