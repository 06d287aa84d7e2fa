//! The first phase of a connection: client and server find out what the other can do, and agree on an export.
//!
//! An option is at most [`OPTION_BYTES_MAX`] long, which holds a name of the greatest length the protocol allows. A client has
//! [`OPTIONS_MAX`] of them.

use std::io::{self, BufReader, Read, Write};

use super::socket::Stream;
use super::wire::{self, Parser, handshake, info, option, option_reply, transmission};
use super::{Export, find_export};
use crate::device::BLOCK_BYTES;

const OPTION_BYTES_MAX: usize = 8192;
const OPTIONS_MAX: usize = 200;

/// What was agreed on.
pub(super) struct Agreed<'e> {
    pub export: &'e Export,
    pub structured: bool,
    pub block_status: bool,
}

/// How far the client has come.
struct Haggling<'e, 's> {
    exports: &'e [Export],
    out: &'s Stream,
    no_zeroes: bool,
    structured: bool,
    /// The export for which `base:allocation` was chosen.
    context_of: Option<&'e Export>,
}

/// What an option led to.
enum Next<'e> {
    Haggle,
    Serve(&'e Export),
    Part,
}

/// Haggles until there is an agreement; `None` if the client leaves or talks nonsense.
pub(super) fn haggle<'e>(
    input: &mut BufReader<Stream>,
    out: &Stream,
    exports: &'e [Export],
) -> io::Result<Option<Agreed<'e>>> {
    let mut greeting = [0; 18];
    greeting[..8].copy_from_slice(&wire::MAGIC.to_be_bytes());
    greeting[8..16].copy_from_slice(&wire::OPTION_MAGIC.to_be_bytes());
    let ours = handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES;
    greeting[16..].copy_from_slice(&(ours as u16).to_be_bytes());
    send(out, &greeting)?;
    let mut theirs = [0; 4];
    input.read_exact(&mut theirs)?;
    let theirs = u32::from_be_bytes(theirs);
    if theirs & !ours != 0 || theirs & handshake::FIXED_NEWSTYLE == 0 {
        return Ok(None);
    }
    let no_zeroes = theirs & handshake::NO_ZEROES != 0;
    let mut haggling = Haggling { exports, out, no_zeroes, structured: false, context_of: None };
    let mut data = [0; OPTION_BYTES_MAX];
    for _ in 0..OPTIONS_MAX {
        let mut header = [0; 16];
        input.read_exact(&mut header)?;
        let mut parser = Parser(&header);
        let (Some(wire::OPTION_MAGIC), Some(option), Some(length)) = (parser.u64(), parser.u32(), parser.u32()) else {
            return Ok(None);
        };
        let Some(data) = data.get_mut(..length as usize) else {
            // Too long to be skipped without giving the client a say in how long we listen.
            if length as usize > 8 * OPTION_BYTES_MAX || option == option::EXPORT_NAME {
                return Ok(None);
            }
            io::copy(&mut input.take(u64::from(length)), &mut io::sink())?;
            haggling.reply(option, option_reply::TOO_BIG, b"the option is too long")?;
            continue;
        };
        input.read_exact(data)?;
        match haggling.answer(option, data)? {
            Next::Haggle => {}
            Next::Part => return Ok(None),
            Next::Serve(export) => {
                let block_status = haggling.context_of.is_some_and(|of| std::ptr::eq(of, export));
                return Ok(Some(Agreed { export, structured: haggling.structured, block_status }));
            }
        }
    }
    Ok(None)
}

fn send(mut out: &Stream, bytes: &[u8]) -> io::Result<()> {
    out.write_all(bytes)
}

impl<'e> Haggling<'e, '_> {
    fn answer(&mut self, option: u32, data: &[u8]) -> io::Result<Next<'e>> {
        match option {
            option::EXPORT_NAME => return self.export_name(data),
            option::ABORT => {
                // The client may be gone without listening.
                let _ = self.reply(option, option_reply::ACK, &[]);
                return Ok(Next::Part);
            }
            option::INFO | option::GO => return self.info_or_go(option, data),
            option::LIST if data.is_empty() => self.list()?,
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.structured = true;
                self.reply(option, option_reply::ACK, &[])?;
            }
            option::LIST | option::STRUCTURED_REPLY => {
                self.reply(option, option_reply::INVALID, b"the option takes no data")?;
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => self.contexts(option, data)?,
            _ => self.reply(option, option_reply::UNSUPPORTED, b"this server does not know the option")?,
        }
        Ok(Next::Haggle)
    }

    /// The old way: there is no answer for a name that is not there but to hang up.
    fn export_name(&mut self, name: &[u8]) -> io::Result<Next<'e>> {
        let Some(export) = find_export(self.exports, name) else { return Ok(Next::Part) };
        let mut answer = [0; 8 + 2 + 124];
        answer[..8].copy_from_slice(&export.device.size_bytes().to_be_bytes());
        answer[8..10].copy_from_slice(&flags_of(export, self.structured).to_be_bytes());
        let length = if self.no_zeroes { 10 } else { answer.len() };
        send(self.out, &answer[..length])?;
        Ok(Next::Serve(export))
    }

    fn info_or_go(&mut self, option: u32, data: &[u8]) -> io::Result<Next<'e>> {
        let Some((name, wanted)) = parse_info(data) else {
            self.reply(option, option_reply::INVALID, b"the option is malformed")?;
            return Ok(Next::Haggle);
        };
        let Some(export) = find_export(self.exports, name) else {
            self.reply(option, option_reply::UNKNOWN, b"there is no export of that name")?;
            return Ok(Next::Haggle);
        };
        if wanted.contains(&info::NAME.to_be_bytes()) {
            let answer = [&info::NAME.to_be_bytes()[..], export.name.as_bytes()].concat();
            self.reply(option, option_reply::INFO, &answer)?;
        }
        let mut answer = [0; 14];
        answer[..2].copy_from_slice(&info::BLOCK_SIZE.to_be_bytes());
        answer[2..6].copy_from_slice(&1u32.to_be_bytes());
        answer[6..10].copy_from_slice(&(BLOCK_BYTES as u32).to_be_bytes());
        answer[10..].copy_from_slice(&wire::PAYLOAD_BYTES_MAX.to_be_bytes());
        self.reply(option, option_reply::INFO, &answer)?;
        let mut answer = [0; 12];
        answer[..2].copy_from_slice(&info::EXPORT.to_be_bytes());
        answer[2..10].copy_from_slice(&export.device.size_bytes().to_be_bytes());
        answer[10..].copy_from_slice(&flags_of(export, self.structured).to_be_bytes());
        self.reply(option, option_reply::INFO, &answer)?;
        self.reply(option, option_reply::ACK, &[])?;
        Ok(if option == option::GO { Next::Serve(export) } else { Next::Haggle })
    }

    fn list(&mut self) -> io::Result<()> {
        for export in self.exports {
            let name = export.name.as_bytes();
            let answer = [&(name.len() as u32).to_be_bytes()[..], name].concat();
            self.reply(option::LIST, option_reply::SERVER, &answer)?;
        }
        self.reply(option::LIST, option_reply::ACK, &[])
    }

    fn contexts(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        let choosing = option == option::SET_META_CONTEXT;
        if choosing {
            // What was chosen before is given up, however this choice ends.
            self.context_of = None;
        }
        let Some((name, asked)) = parse_contexts(data, choosing) else {
            return self.reply(option, option_reply::INVALID, b"the option is malformed");
        };
        if !self.structured {
            return self.reply(option, option_reply::INVALID, b"structured replies come first");
        }
        let export = find_export(self.exports, name);
        if choosing {
            self.context_of = export.filter(|_| asked);
        }
        if export.is_none() {
            return self.reply(option, option_reply::UNKNOWN, b"there is no export of that name");
        }
        if asked {
            let id = if choosing { wire::BASE_ALLOCATION_ID } else { 0 };
            let answer = [&id.to_be_bytes()[..], wire::BASE_ALLOCATION].concat();
            self.reply(option, option_reply::META_CONTEXT, &answer)?;
        }
        self.reply(option, option_reply::ACK, &[])
    }

    fn reply(&self, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let mut header = [0; 20];
        header[..8].copy_from_slice(&wire::OPTION_REPLY_MAGIC.to_be_bytes());
        header[8..12].copy_from_slice(&option.to_be_bytes());
        header[12..16].copy_from_slice(&kind.to_be_bytes());
        header[16..].copy_from_slice(&(data.len() as u32).to_be_bytes());
        send(self.out, &header)?;
        send(self.out, data)
    }
}

/// The name asked for, and the kinds of information, two bytes each.
fn parse_info(data: &[u8]) -> Option<(&[u8], &[[u8; 2]])> {
    let mut parser = Parser(data);
    let (name, count) = (parser.string()?, parser.u16()?);
    let (wanted, rest) = parser.0.as_chunks();
    (rest.is_empty() && wanted.len() == usize::from(count)).then_some((name, wanted))
}

/// The export's name, and whether `base:allocation` is among what is asked for. Who lists may ask for a whole namespace,
/// or for everything by asking for nothing.
fn parse_contexts(data: &[u8], choosing: bool) -> Option<(&[u8], bool)> {
    let mut parser = Parser(data);
    let (name, count) = (parser.string()?, parser.u32()?);
    let mut asked = count == 0 && !choosing;
    for _ in 0..count {
        let query = parser.string()?;
        asked |= query == wire::BASE_ALLOCATION || !choosing && query == b"base:";
    }
    parser.0.is_empty().then_some((name, asked))
}

fn flags_of(export: &Export, structured: bool) -> u16 {
    use transmission::*;
    let always = HAS_FLAGS | SEND_FLUSH | SEND_FUA | CAN_MULTI_CONN | SEND_CACHE;
    let quick = if export.device.zeroes_quickly() { SEND_FAST_ZERO } else { 0 };
    let changing = SEND_TRIM | SEND_WRITE_ZEROES | quick;
    let whole_replies = if structured { SEND_DF } else { 0 };
    always | whole_replies | if export.read_only { READ_ONLY } else { changing }
}
