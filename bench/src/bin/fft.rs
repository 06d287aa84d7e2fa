//! A blocked Fourier transform: `fft POWER` transforms 4^POWER complex numbers, 16 bytes each.
//!
//! The numbers are a square matrix. It is transposed block by block, its rows are transformed and turned, and this once more, so that
//! every step goes over memory in order or in blocks (the four-step method). What is printed is a digest of the spectrum, and how far its
//! energy is from that of the signal (Parseval's theorem): more than [`ERROR_MAX`] is a failure.
//!
//! # Source
//! D. H. Bailey, "FFTs in External or Hierarchical Memory", 1990.

use std::f64::consts::TAU;
use std::process::ExitCode;

/// Rows and columns of a block: an eighth of a page in each row.
const BLOCK: usize = 32;
const ERROR_MAX: f64 = 1e-9;

#[derive(Clone, Copy, Default)]
struct Complex {
    re: f64,
    im: f64,
}

impl Complex {
    fn turned(angle: f64) -> Complex {
        Complex { re: angle.cos(), im: angle.sin() }
    }

    fn times(self, other: Complex) -> Complex {
        Complex { re: self.re * other.re - self.im * other.im, im: self.re * other.im + self.im * other.re }
    }
}

/// The transform of `side * side` numbers.
struct Transform {
    side: usize,
    /// The powers of the root of unity of `side`.
    roots: Vec<Complex>,
}

impl Transform {
    fn new(power: u32) -> Transform {
        let side = 1 << power;
        let roots = (0..side / 2).map(|nth| Complex::turned(-TAU * nth as f64 / side as f64)).collect();
        Transform { side, roots }
    }

    /// In place; the result is transposed.
    fn run(&self, numbers: &mut [Complex]) {
        self.transpose(numbers);
        let step = -TAU / numbers.len() as f64;
        for (nth, row) in numbers.chunks_exact_mut(self.side).enumerate() {
            self.row(row);
            for (column, number) in row.iter_mut().enumerate() {
                *number = number.times(Complex::turned(step * (nth * column) as f64));
            }
        }
        self.transpose(numbers);
        numbers.chunks_exact_mut(self.side).for_each(|row| self.row(row));
    }

    fn transpose(&self, numbers: &mut [Complex]) {
        for top in (0..self.side).step_by(BLOCK) {
            for left in (top..self.side).step_by(BLOCK) {
                for row in top..(top + BLOCK).min(self.side) {
                    for column in left.max(row + 1)..(left + BLOCK).min(self.side) {
                        numbers.swap(row * self.side + column, column * self.side + row);
                    }
                }
            }
        }
    }

    fn row(&self, row: &mut [Complex]) {
        let bits = row.len().trailing_zeros();
        for nth in 0..row.len() {
            let reversed = nth.reverse_bits() >> (usize::BITS - bits);
            if nth < reversed {
                row.swap(nth, reversed);
            }
        }
        let mut half = 1;
        while half < row.len() {
            let step = self.roots.len() / half;
            for pair in row.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (nth, (low, high)) in low.iter_mut().zip(high).enumerate() {
                    let turned = high.times(self.roots[nth * step]);
                    let sum = Complex { re: low.re + turned.re, im: low.im + turned.im };
                    *high = Complex { re: low.re - turned.re, im: low.im - turned.im };
                    *low = sum;
                }
            }
            half *= 2;
        }
    }
}

/// A few tones and some noise, as a sound card would deliver it: 16 bits.
fn signal(nth: usize) -> f64 {
    let noise = (nth as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 55;
    let tones = (nth as f64 * 0.01).sin() * 12000.0 + (nth as f64 * 0.23).sin() * 4000.0;
    (tones + noise as f64).round()
}

fn main() -> ExitCode {
    let power = std::env::args().nth(1).and_then(|word| word.parse().ok()).filter(|power| (1..=13).contains(power));
    let Some(power) = power else {
        eprintln!("usage: fft POWER, 1 to 13: transforms 4^POWER numbers");
        return ExitCode::from(2);
    };
    let transform = Transform::new(power);
    let mut energy = 0.0;
    let number = |nth| {
        let re = signal(nth);
        energy += re * re;
        Complex { re, im: 0.0 }
    };
    let mut numbers: Vec<_> = (0..1 << (2 * power)).map(number).collect();
    transform.run(&mut numbers);
    let (mut digest, mut energy_after) = (0u64, 0.0);
    for number in &numbers {
        let word = number.re.to_bits() ^ number.im.to_bits().rotate_left(32);
        digest = (digest.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        energy_after += number.re * number.re + number.im * number.im;
    }
    let error = (energy_after / numbers.len() as f64 / energy - 1.0).abs();
    println!("{} numbers, digest {digest:016x}, error below {ERROR_MAX:e}: {}", numbers.len(), error < ERROR_MAX);
    if error < ERROR_MAX { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transform_is_the_sum_that_defines_it() {
        let transform = Transform::new(2);
        let numbers: Vec<_> = (0..16).map(|nth| Complex { re: signal(nth * 37), im: nth as f64 }).collect();
        let mut spectrum = numbers.clone();
        transform.run(&mut spectrum);
        for frequency in 0..16 {
            let terms = numbers
                .iter()
                .enumerate()
                .map(|(nth, number)| number.times(Complex::turned(-TAU * (nth * frequency) as f64 / 16.0)));
            let sum =
                terms.fold(Complex::default(), |sum, term| Complex { re: sum.re + term.re, im: sum.im + term.im });
            let found = spectrum[frequency % 4 * 4 + frequency / 4];
            assert!((found.re - sum.re).abs() < 1e-6 && (found.im - sum.im).abs() < 1e-6, "{frequency}");
        }
    }
}
